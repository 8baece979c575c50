"""The speed of one answer: time to first token, and tokens per second."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speed:
    """The measurements of one answer."""

    ttft_s: float
    """Seconds to the first token."""
    total_s: float
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first token."""
        after_first_s = self.total_s - self.ttft_s
        return (self.num_tokens - 1) / after_first_s if after_first_s > 0 and self.num_tokens > 1 else 0.0

    def __str__(self) -> str:
        return (
            f"{self.num_tokens} tokens: the first after {self.ttft_s * 1000:.0f} ms, "
            f"the rest at {self.tokens_per_s:.1f} tokens/s"
        )


class SpeedMeter:
    """Measure an answer while it comes."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._first_s = self._last_s = self._started_s
        self._num_tokens = 0

    def count(self, num_tokens: int) -> None:
        """Note that this number of tokens has just come."""
        if not num_tokens:
            return
        self._last_s = time.perf_counter()
        if not self._num_tokens:
            self._first_s = self._last_s
        self._num_tokens += num_tokens

    @property
    def speed(self) -> Speed:
        """The measurements so far."""
        return Speed(self._first_s - self._started_s, self._last_s - self._started_s, self._num_tokens)
