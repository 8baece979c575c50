"""How many tokens a step may have, and how sequences share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.gpu_node.engine.steps import Ints

if TYPE_CHECKING:
    from penstock.gpu_node.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What bounds a step and a sequence."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_beside_decode: int
    """Prompt tokens in a step in which other sequences decode."""
    max_model_len: int
    max_prefill_ms_beside_decode: float | None = None
    """Milliseconds that prompts may add to a step in which other sequences decode; see `PrefillBudget`."""

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> StepLimits:
        """As an engine's settings have them."""
        return cls(
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_beside_decode=config.max_prefill_beside_decode or config.max_num_batched_tokens,
            max_model_len=max_model_len,
            max_prefill_ms_beside_decode=config.max_prefill_ms_beside_decode,
        )


class StepSize:
    """Most tokens that a step may have: after one that found no memory half as many as it had, then more again.

    It is doubled after some computed steps, after twice as many where that was too early.
    """

    _FIRST_WAIT = 8
    _LONGEST_WAIT = 1024

    def __init__(self, most: int) -> None:
        self._most = most
        self.restore()

    def restore(self) -> None:
        """What made steps fail is gone."""
        self.max_tokens = self._most
        self._wait = self._FIRST_WAIT
        self._num_landed = 0
        self._has_grown = False

    def found_no_memory(self, num_tokens: int) -> None:
        """A step of so many tokens did."""
        self.max_tokens = max(1, num_tokens // 2)
        if self._has_grown:
            self._wait = min(self._LONGEST_WAIT, 2 * self._wait)
        self._num_landed, self._has_grown = 0, False

    def landed(self) -> None:
        """A step was computed."""
        if self.max_tokens == self._most:
            return
        self._num_landed += 1
        if self._num_landed == self._wait:
            self.max_tokens = min(self._most, 2 * self.max_tokens)
            self._num_landed, self._has_grown = 0, True


def within(budget: int, starts: Ints, num_tokens: Ints) -> Ints:
    """How far each gets with its part of a budget that is spent in order; whoever gets nothing is left out."""
    spent = np.cumsum(num_tokens - starts)
    if not len(spent) or spent[-1] <= budget:
        return num_tokens
    ends: Ints = num_tokens - np.maximum(spent - budget, 0).astype(np.int32)
    served: Ints = ends[ends > starts]
    return served
