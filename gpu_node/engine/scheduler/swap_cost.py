"""Whether a sequence that loses its blocks has them copied to the host, or computed again later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    # Commands know the settings of nodes where numpy is not installed.
    from penstock.gpu_node.model.protocol import StepResult

PreemptionName = Literal["auto", "recompute", "swap"]

_BYTES_PER_S = float(4 << 30)
"""Believed until copies were measured."""
_WEIGHT = 0.2
"""Of a new measurement in the rate."""
_MIN_PREFILL = 16
"""Tokens: steps that compute fewer say what a step costs, not what a token does."""


class SwapCost:
    """Compares the two ways by rates that are measured while the engine runs."""

    def __init__(self, preemption: PreemptionName, block_bytes: int) -> None:
        self._preemption = preemption
        self._block_bytes = block_bytes
        self._copied_bytes_per_ms = _BYTES_PER_S / 1e3
        self._prefilled_per_ms: float | None = None

    def note_step(self, num_copies: int, num_prefill_tokens: int, result: StepResult) -> None:
        """A step copied so many blocks and computed so many tokens of prompts."""
        self.note_copies(num_copies, result.copy_ms)
        self.note_forward(num_prefill_tokens, result.forward_ms)

    def note_copies(self, num_blocks: int, took_ms: float) -> None:
        """A step copied so many blocks."""
        if num_blocks and took_ms > 0:
            self._copied_bytes_per_ms += _WEIGHT * (
                num_blocks * self._block_bytes / took_ms - self._copied_bytes_per_ms
            )

    def note_forward(self, num_prefill_tokens: int, took_ms: float) -> None:
        """A step computed so many tokens of prompts, and what else it computed besides."""
        if num_prefill_tokens >= _MIN_PREFILL and took_ms > 0:
            rate = num_prefill_tokens / took_ms
            known = rate if self._prefilled_per_ms is None else self._prefilled_per_ms
            self._prefilled_per_ms = known + _WEIGHT * (rate - known)

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to copy so many blocks out and in again, rather than to compute so many tokens again."""
        if self._preemption != "auto":
            return self._preemption == "swap"
        if self._prefilled_per_ms is None:
            return True
        copy_ms = 2 * num_blocks * self._block_bytes / self._copied_bytes_per_ms
        return copy_ms < num_tokens / self._prefilled_per_ms
