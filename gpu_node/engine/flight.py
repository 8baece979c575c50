"""The step that the runner has, and where its time and the engine's goes."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from penstock.gpu_node.engine.rows import Step
from penstock.gpu_node.model.protocol import ModelRunner, StepPlan, StepResult

_WINDOW = 256


class Flight:
    """A submitted step. It holds the plan, whose arrays the runner reads until the step is done."""

    def __init__(self, runner: ModelRunner, step: Step, plan: StepPlan) -> None:
        self.step = step
        self._plan = plan
        self._submitted_s = time.perf_counter()
        self._outcome: Future[StepResult] = Future()
        try:
            self._handle = runner.submit(plan)
        except Exception as error:
            # Raised by `result`, like a failure on the way: what landed before this step is handed out first.
            self._outcome.set_exception(error)

    def wait(self) -> None:
        """Block until the step is done or has failed."""
        if self._outcome.done():
            return
        try:
            self._outcome.set_result(self._handle.result())
        except Exception as error:
            self._outcome.set_exception(error)

    def result(self) -> StepResult:
        """Wait for it; raises what made the whole step fail."""
        self.wait()
        return self._outcome.result()

    @property
    def age_ms(self) -> float:
        """Time since it was submitted."""
        return (time.perf_counter() - self._submitted_s) * 1e3


class Window:
    """A time of each of the last few hundred steps. As a context it measures one."""

    def __init__(self) -> None:
        self._values_ms: deque[float] = deque(maxlen=_WINDOW)
        self._entered_s = 0.0

    def add(self, value_ms: float) -> None:
        """Take in a step's time."""
        self._values_ms.append(value_ms)

    def mean(self) -> float:
        """Their mean; 0 before the first."""
        return sum(self._values_ms) / max(1, len(self._values_ms))

    def percentile(self, percent: int) -> float:
        """The time that so many percent are below; 0 before the first."""
        ordered = sorted(self._values_ms) or [0.0]
        return ordered[len(ordered) * percent // 100]

    def __enter__(self) -> None:
        self._entered_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.add((time.perf_counter() - self._entered_s) * 1e3)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the time of steps goes; `EngineStats` says what each part is."""

    step: Window = field(default_factory=Window)
    schedule: Window = field(default_factory=Window)
    prepare: Window = field(default_factory=Window)
    forward: Window = field(default_factory=Window)
    sample: Window = field(default_factory=Window)
    output: Window = field(default_factory=Window)
