"""A runner that fails where a test asks for it. As with a real failure, the blocks that the step writes are lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal

import numpy as np
from fixtures.sampling import rows_of

from penstock.gpu_node.model.protocol import (
    NULL_BLOCK,
    CacheSizes,
    ModelRunner,
    StateSizes,
    StepHandle,
    StepPlan,
    StepResult,
)

_WRONG_TOKEN = 3
Place = Literal["start", "copy", "forward"]


class FaultyRunner:
    """Runs steps on another runner, unless `fault` returns an error for a stage of a plan.

    `start`: before any work, as when a buffer cannot be allocated; `copy`: in the middle of the copies;
    `forward`: after keys and values of all tokens are written.
    """

    def __init__(self, runner: ModelRunner, fault: Callable[[Place, StepPlan], Exception | None]) -> None:
        self._runner = runner
        self._fault = fault
        self.num_failures = 0
        self.num_tokens: list[int] = []
        """Of each step that was computed."""

    @property
    def max_in_flight(self) -> int:
        """The wrapped runner's limit."""
        return self._runner.max_in_flight

    @property
    def cache_sizes(self) -> CacheSizes:
        """The wrapped runner's sizes."""
        return self._runner.cache_sizes

    @property
    def state_sizes(self) -> StateSizes:
        """The wrapped runner's sizes."""
        return self._runner.state_sizes

    def bind_thread(self) -> None:
        """Call the wrapped runner's method."""
        self._runner.bind_thread()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step, or fail."""
        if error := self._fault("start", plan):
            self.num_failures += 1
            raise error
        error = (self._fault("copy", plan) if len(plan.copies) else None) or self._fault("forward", plan)
        if error is None:
            self.num_tokens.append(len(plan.token_ids))
            return self._runner.submit(plan)
        self.num_failures += 1
        self._runner.submit(_spoiled(plan)).result()
        failed: Future[StepResult] = Future()
        failed.set_exception(error)
        return failed


def _spoiled(plan: StepPlan) -> StepPlan:
    """Return a step that writes wrong contents to the same slots as the plan's step, and samples nothing."""
    copies = plan.copies.copy()
    copies[:, 0] = NULL_BLOCK
    wrong = np.full_like(plan.token_ids, _WRONG_TOKEN)
    nothing = np.empty(0, np.int32)
    return replace(plan, token_ids=wrong, copies=copies, sample_tokens=nothing, sampling=rows_of(0), scored=None)
