"""When a choice ends by its tokens alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EndReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class EndRule:
    """What ends a choice besides its text. An id of `end_ids` does so once `min_tokens` tokens stand before it."""

    end_ids: frozenset[int]
    min_tokens: int
    max_tokens: int

    def reason(self, token_id: int, num_tokens: int) -> EndReason | None:
        """Why a choice ends with `token_id` as its `num_tokens`-th token, or None when it goes on."""
        if token_id in self.end_ids and num_tokens > self.min_tokens:
            return "stop"
        return "length" if num_tokens >= self.max_tokens else None
