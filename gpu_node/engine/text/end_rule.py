"""The rule by which tokens alone end a choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EndReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class EndRule:
    """Ends a choice at a token of `end_ids` after at least `min_tokens` other tokens, or at `max_tokens` tokens."""

    end_ids: frozenset[int]
    min_tokens: int
    max_tokens: int

    def reason(self, token_id: int, num_tokens: int) -> EndReason | None:
        """Return why the choice ends with `token_id` as its `num_tokens`-th token; None if it continues."""
        if token_id in self.end_ids and num_tokens > self.min_tokens:
            return "stop"
        return "length" if num_tokens >= self.max_tokens else None
