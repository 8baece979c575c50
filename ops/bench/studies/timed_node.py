"""A node whose steps take a modelled time, so that a study's figures hardly depend on the machine's load.

Scheduler, cache, tokens and queue are the real ones; only the runner sleeps until a step of that many rows and prompt
tokens would be over: `python -m bench.studies.timed_node MODEL REDIS_URL SCALE`. SCALE multiplies all times.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace

import numpy as np

from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.protocol import StepHandle, StepPlan, StepResult
from penstock.gpu_node.process import run_node
from penstock.gpu_node.settings import NodeSettings

STEP_MS, ROW_MS, PROMPT_TOKEN_MS = 12.0, 1.2, 0.7
"""About a step of the demo model on one core."""


def step_ms(plan: StepPlan) -> float:
    """Return the modelled time of a step."""
    counts = np.diff(plan.query_starts)
    num_rows = int(np.count_nonzero(counts == 1))
    return STEP_MS + ROW_MS * num_rows + PROMPT_TOKEN_MS * (int(counts.sum()) - num_rows)


class TimedHandle:
    """A step that is over at a certain time."""

    def __init__(self, handle: StepHandle, ms: float) -> None:
        self._handle = handle
        self._ms = ms
        self._ends_s = time.monotonic() + ms / 1e3

    def result(self) -> StepResult:
        """Wait until the step is over."""
        result = self._handle.result()
        time.sleep(max(0.0, self._ends_s - time.monotonic()))
        return replace(result, forward_ms=self._ms, sample_ms=0.0)


def main() -> None:
    """Serve a model until SIGTERM."""
    model, redis_url, scale = sys.argv[1:]
    submit = NativeRunner.submit

    def timed(self: NativeRunner, plan: StepPlan) -> StepHandle:
        return TimedHandle(submit(self, plan), float(scale) * step_ms(plan))

    NativeRunner.submit = timed  # type: ignore[method-assign]
    asyncio.run(run_node(NodeSettings.load(model=model, redis_url=redis_url)))


if __name__ == "__main__":
    main()
