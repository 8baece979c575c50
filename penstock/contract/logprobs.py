"""Log-probabilities of tokens: log-softmax of the model's raw logits, before bias, penalties and temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_LOGPROBS = 20
"""Most alternatives that are reported for a token."""
MAX_LOGPROBS_OF_JOB = 1 << 18
"""Log-probabilities of a whole job, at most: the result is a single Redis value."""
PROMPT_TOKENS_PER_CHUNK = 128
"""Prompt tokens per chunk of prompt log-probabilities; the last chunk may have fewer."""


class Logprob(NamedTuple):
    """One candidate token of a position and its log-probability."""

    token_id: int
    logprob: float
    token: bytes
    """The UTF-8 bytes that the token adds to the text, possibly a partial character; a special token's name."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the actual token first, then the most likely tokens, best first.

    The first token of a prompt has no value, because no logits precede it. In `tokens`, a str is the name of a special
    token, which adds nothing to the text; bytes are an ordinary token's contribution to the text.
    """

    token_ids: tuple[int, ...]
    values: tuple[float, ...]
    tokens: tuple[bytes | str, ...]

    @property
    def logprob(self) -> float | None:
        """The log-probability of the actual token; None for the first token of a prompt."""
        return self.values[0] if self.values else None

    @property
    def token(self) -> bytes:
        """The bytes of the actual token, or the name of a special token."""
        return _bytes_of(self.tokens[0])

    @property
    def shown(self) -> bytes:
        """The bytes that the actual token adds to the text; empty for a special token."""
        token = self.tokens[0]
        return b"" if isinstance(token, str) else token

    @property
    def top(self) -> list[Logprob]:
        """The most likely tokens, best first, as many as were requested."""
        named = zip(self.token_ids[1:], self.values[1:], self.tokens[1:], strict=True)
        return [Logprob(token_id, value, _bytes_of(token)) for token_id, value, token in named]


def _bytes_of(token: bytes | str) -> bytes:
    return token.encode() if isinstance(token, str) else token
