"""A runner that accepts a step before the previous one has ended, as a GPU's does, around one that does not."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from penstock.gpu_node.model.protocol import CacheSizes, ModelRunner, StateSizes, StepPlan, StepResult


class AheadRunner:
    """Runs all calls in order on its own thread.

    A step after a failed one computes on tokens that were never sampled.
    """

    max_in_flight = 2

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1)
        self._said = np.zeros(0, np.int32)
        self.num_ahead = 0
        """Steps that were submitted before their tokens were known."""

    @property
    def cache_sizes(self) -> CacheSizes:
        """The wrapped runner's sizes."""
        return self._runner.cache_sizes

    @property
    def state_sizes(self) -> StateSizes:
        """The wrapped runner's sizes."""
        return self._runner.state_sizes

    def bind_thread(self) -> None:
        """Do nothing: steps run on another thread."""

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step."""
        self.num_ahead += bool((plan.token_ids < 0).any())
        return self._thread.submit(self._step, plan)

    def _step(self, plan: StepPlan) -> StepResult:
        said, self._said = self._said, np.zeros(len(plan.sample_tokens), np.int32)
        ids = plan.token_ids.copy()
        to_come = ids < 0
        ids[to_come] = np.maximum(said[-1 - ids[to_come]], 0)
        result = self._runner.submit(replace(plan, token_ids=ids)).result()
        self._said = result.tokens
        return result
