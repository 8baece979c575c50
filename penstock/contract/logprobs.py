"""Log-probabilities of tokens: by the softmax of the model's logits as they are, before anything that sampling does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_LOGPROBS = 20
"""Alternatives of a token."""
MAX_LOGPROBS_OF_JOB = 1 << 18
"""Values that all tokens of a job may come to: a result is one message."""
PROMPT_TOKENS_PER_CHUNK = 128
"""A chunk of the prompt's has the values of so many tokens, the last one of the rest."""


class Logprob(NamedTuple):
    """A token that could have stood at a place, and how likely it was there."""

    token_id: int
    logprob: float
    token: bytes
    """What it adds to a text, which need not be whole characters; a special token's name."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token, which comes first, and the likeliest ones at its place, the best first.

    The first token of a prompt has no value, since nothing stands before it. A special token, of which a text shows
    nothing, has its name as a str.
    """

    token_ids: tuple[int, ...]
    values: tuple[float, ...]
    tokens: tuple[bytes | str, ...]

    @property
    def logprob(self) -> float | None:
        """The token's own."""
        return self.values[0] if self.values else None

    @property
    def token(self) -> bytes:
        """The token's own bytes."""
        return _bytes_of(self.tokens[0])

    @property
    def shown(self) -> bytes:
        """What of the token a text shows."""
        token = self.tokens[0]
        return b"" if isinstance(token, str) else token

    @property
    def top(self) -> list[Logprob]:
        """The likeliest tokens, the best first, as many as were asked for."""
        named = zip(self.token_ids[1:], self.values[1:], self.tokens[1:], strict=True)
        return [Logprob(token_id, value, _bytes_of(token)) for token_id, value, token in named]


def _bytes_of(token: bytes | str) -> bytes:
    return token.encode() if isinstance(token, str) else token
