"""Decide whether a preempted sequence's blocks are swapped to the host or recomputed later."""

from __future__ import annotations

from typing import Literal

PreemptionName = Literal["auto", "recompute", "swap"]

_BYTES_PER_S = float(4 << 30)
"""Assumed copy rate until copies are measured."""
_WEIGHT = 0.2
"""Weight of a new measurement in the moving average."""
_MIN_PREFILL = 16
"""Tokens: the time of smaller steps shows the fixed cost of a step, not the cost of a token."""


class SwapCost:
    """Compares swapping with recomputation by rates measured while the engine runs."""

    def __init__(self, preemption: PreemptionName, block_bytes: int) -> None:
        self._preemption = preemption
        self._block_bytes = block_bytes
        self._copied_bytes_per_ms = _BYTES_PER_S / 1e3
        self._prefilled_per_ms: float | None = None

    def note_copies(self, num_blocks: int, took_ms: float) -> None:
        """Record that a step copied `num_blocks` blocks in `took_ms`."""
        if num_blocks and took_ms > 0:
            self._copied_bytes_per_ms += _WEIGHT * (
                num_blocks * self._block_bytes / took_ms - self._copied_bytes_per_ms
            )

    def note_forward(self, num_prefill_tokens: int, took_ms: float) -> None:
        """Record that a step with `num_prefill_tokens` prompt tokens took `took_ms`, other tokens included."""
        if num_prefill_tokens >= _MIN_PREFILL and took_ms > 0:
            rate = num_prefill_tokens / took_ms
            known = rate if self._prefilled_per_ms is None else self._prefilled_per_ms
            self._prefilled_per_ms = known + _WEIGHT * (rate - known)

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether copying the blocks out and back costs less than computing the tokens again."""
        if self._preemption != "auto":
            return self._preemption == "swap"
        if self._prefilled_per_ms is None:
            return True
        copy_ms = 2 * num_blocks * self._block_bytes / self._copied_bytes_per_ms
        return copy_ms < num_tokens / self._prefilled_per_ms
