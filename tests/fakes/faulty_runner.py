"""A runner that fails where a test says, as a real one would: what the step was to write is lost by then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal

import numpy as np

from penstock.gpu_node.model.protocol import CacheSizes, ModelRunner, StepHandle, StepPlan, StepResult

BLOCK_SIZE = 16
Place = Literal["start", "copy", "forward", "clear"]


class FaultyRunner:
    """Runs steps on another runner, unless `fault` names an error for a place in a plan.

    `start`: before anything is done, as where a buffer cannot be allocated. `copy`: in the middle of the copies.
    `forward`: when keys and values of all tokens are written. `clear`: instead of clearing blocks; it has no plan to
    look at.
    """

    def __init__(self, runner: ModelRunner, fault: Callable[[Place, StepPlan | None], Exception | None]) -> None:
        self._runner = runner
        self._fault = fault
        self.num_failures = 0
        self.num_tokens: list[int] = []
        """Of each step that was computed."""

    @property
    def max_in_flight(self) -> int:
        """As many as the other."""
        return self._runner.max_in_flight

    @property
    def cache_sizes(self) -> CacheSizes:
        """The other's."""
        return self._runner.cache_sizes

    def bind_thread(self) -> None:
        """As the other does."""
        self._runner.bind_thread()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step, or fail."""
        self._maybe_fail("start", plan, [])
        failed: Future[StepResult] = Future()
        try:
            if len(plan.copies):
                self._maybe_fail("copy", plan, plan.copies[:, 1].tolist())
            self._maybe_fail("forward", plan, [*plan.copies[:, 1].tolist(), *_written(plan)])
        except Exception as error:
            failed.set_exception(error)
            return failed
        self.num_tokens.append(len(plan.token_ids))
        return self._runner.submit(plan)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Clear blocks, or fail."""
        self._maybe_fail("clear", None, [])
        self._runner.zero_blocks(block_ids)

    def _maybe_fail(self, place: Place, plan: StepPlan | None, lost_blocks: Sequence[int]) -> None:
        error = self._fault(place, plan)
        if error is not None:
            self.num_failures += 1
            if lost_blocks:
                self._runner.zero_blocks(lost_blocks)
            raise error


def _written(plan: StepPlan) -> list[int]:
    """Blocks that hold nothing but what this step stores."""
    counts = np.diff(plan.query_starts)
    spans = zip(plan.block_tables, plan.context_lens - counts, plan.context_lens, strict=True)
    return [int(block) for row, start, end in spans for block in row[-(-start // BLOCK_SIZE) : -(-end // BLOCK_SIZE)]]
