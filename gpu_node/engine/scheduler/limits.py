"""Limits of a step, and how sequences share its token budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.gpu_node.engine.steps import Ints

if TYPE_CHECKING:
    from penstock.gpu_node.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of steps and sequences."""

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
        """Return the limits that an engine's settings define."""
        return cls(
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_beside_decode=config.max_prefill_beside_decode or config.max_num_batched_tokens,
            max_model_len=max_model_len,
            max_prefill_ms_beside_decode=config.max_prefill_ms_beside_decode,
        )


class StepSize:
    """The largest number of tokens in a step. It is halved when a step runs out of memory, and grows back later.

    It doubles after a number of computed steps. If a step then runs out of memory again, that number doubles too.
    """

    _FIRST_WAIT = 8
    _LONGEST_WAIT = 1024

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.restore()

    def restore(self) -> None:
        """Restore the full size, because the cause of failures is gone."""
        self.max_tokens = self._limit
        self._wait = self._FIRST_WAIT
        self._num_completed = 0
        self._has_grown = False

    def note_out_of_memory(self, num_tokens: int) -> None:
        """Record that a step of `num_tokens` tokens ran out of memory."""
        self.max_tokens = max(1, num_tokens // 2)
        if self._has_grown:
            self._wait = min(self._LONGEST_WAIT, 2 * self._wait)
        self._num_completed, self._has_grown = 0, False

    def note_completed(self) -> None:
        """Record that a step was computed."""
        if self.max_tokens == self._limit:
            return
        self._num_completed += 1
        if self._num_completed == self._wait:
            self.max_tokens = min(self._limit, 2 * self.max_tokens)
            self._num_completed, self._has_grown = 0, True


def ends_within_budget(budget: int, starts: Ints, num_tokens: Ints) -> Ints:
    """Spend a budget on sequences in order; return the end of each one that gets tokens."""
    spent = np.cumsum(num_tokens - starts)
    if not len(spent) or spent[-1] <= budget:
        return num_tokens
    ends: Ints = num_tokens - np.maximum(spent - budget, 0).astype(np.int32)
    served: Ints = ends[ends > starts]
    return served
