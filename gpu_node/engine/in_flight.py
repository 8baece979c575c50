"""The step that the runner has, and where its time and the engine's goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypedDict

from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.model.protocol import ModelRunner, StepPlan, StepResult

_WINDOW = 256


class InFlightStep:
    """A submitted step. It holds the plan, whose arrays the runner reads until the step is done."""

    def __init__(
        self, runner: ModelRunner, step: Step, plan: Callable[[Step], StepPlan], broken_blocks: list[int]
    ) -> None:
        """`broken_blocks` are cleared first, and are none then."""
        self.step = step
        self.started_s = time.perf_counter()
        """When it was submitted, or when the one ahead of it had landed."""
        self._outcome: Future[StepResult] = Future()
        try:
            if broken_blocks:
                runner.zero_blocks(broken_blocks)
                broken_blocks.clear()
            self.plan = plan(step)
            self._handle = runner.submit(self.plan)
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
    def has_failed(self) -> bool:
        """Whether it is known to have failed."""
        return self._outcome.done() and self._outcome.exception() is not None

    @property
    def age_ms(self) -> float:
        """Time since it was submitted, or since the one ahead of it had landed."""
        return (time.perf_counter() - self.started_s) * 1e3


class InFlightSteps:
    """The steps that the runner has, the oldest first."""

    def __init__(self) -> None:
        self.broken_blocks: list[int] = []
        """What has to be cleared before the next step."""
        self._flights: deque[InFlightStep] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def steps(self) -> list[Step]:
        """What they compute."""
        return [flight.step for flight in tuple(self._flights)]

    def may_have(self, runner: ModelRunner) -> bool:
        """Whether the runner takes one more now; nothing is built on a step that failed."""
        flights = self._flights
        return not flights or (len(flights) < runner.max_in_flight and not flights[-1].has_failed)

    def launch(self, runner: ModelRunner, step: Step, plan: Callable[[Step], StepPlan]) -> None:
        """Submit a step."""
        self._flights.append(InFlightStep(runner, step, plan, self.broken_blocks))

    def wait(self) -> None:
        """Block until the oldest is done, and those behind it if it failed: they will be dropped with it."""
        for flight in self._flights:
            flight.wait()
            if not flight.has_failed:
                return

    def land(self) -> InFlightStep:
        """Wait for the oldest and take it out; where it failed, the others as well."""
        # An interrupt while waiting leaves all of them where they are: they will land.
        self.wait()
        flight = self._flights.popleft()
        if flight.has_failed:
            self._flights.clear()
        for one in self._flights:
            one.started_s = time.perf_counter()
        return flight


class SampleWindow:
    """A time of each of the last few hundred steps. As a context it measures one."""

    def __init__(self) -> None:
        self._values_ms: deque[float] = deque(maxlen=_WINDOW)
        self._entered_s = 0.0

    def add(self, value_ms: float) -> None:
        """Take in a step's time."""
        self._values_ms.append(value_ms)

    @property
    def last(self) -> float:
        """The last one; 0 before the first."""
        return self._values_ms[-1] if self._values_ms else 0.0

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


class StepStats(TypedDict):
    """The fields of EngineStats that steps fill."""

    steps: int
    num_failed_steps: int
    num_memory_failures: int
    prefill_tokens: int
    decode_tokens: int
    copied_blocks: int
    step_ms_p50: float
    step_ms_p99: float
    schedule_ms: float
    prepare_ms: float
    copy_ms: float
    forward_ms: float
    sample_ms: float
    output_ms: float


@dataclass(slots=True)
class StepTimings:
    """What steps did and where their time went; `EngineStats` says what each part is."""

    steps: int = 0
    num_failed_steps: int = 0
    num_memory_failures: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    copied_blocks: int = 0

    step: SampleWindow = field(default_factory=SampleWindow)
    copies: SampleWindow = field(default_factory=SampleWindow)
    schedule: SampleWindow = field(default_factory=SampleWindow)
    prepare: SampleWindow = field(default_factory=SampleWindow)
    forward: SampleWindow = field(default_factory=SampleWindow)
    sample: SampleWindow = field(default_factory=SampleWindow)
    output: SampleWindow = field(default_factory=SampleWindow)

    def land(self, flight: InFlightStep, result: StepResult, num_tokens: int) -> None:
        """Count a step that was computed and gave so many tokens."""
        self.steps += 1
        self.prefill_tokens += flight.step.num_prefill_tokens
        self.decode_tokens += num_tokens
        self.copied_blocks += len(flight.step.copies)
        self.step.add(flight.age_ms)
        self.copies.add(result.copy_ms)
        self.forward.add(result.forward_ms)
        self.sample.add(result.sample_ms)

    def fail(self, error: Exception) -> None:
        """Count a step that was not."""
        self.num_failed_steps += 1
        self.num_memory_failures += isinstance(error, MemoryError)

    def figures(self) -> StepStats:
        """All of it as EngineStats has it."""
        return StepStats(
            steps=self.steps,
            num_failed_steps=self.num_failed_steps,
            num_memory_failures=self.num_memory_failures,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            copied_blocks=self.copied_blocks,
            step_ms_p50=self.step.percentile(50),
            step_ms_p99=self.step.percentile(99),
            schedule_ms=self.schedule.mean(),
            prepare_ms=self.prepare.mean(),
            copy_ms=self.copies.mean(),
            forward_ms=self.forward.mean(),
            sample_ms=self.sample.mean(),
            output_ms=self.output.mean(),
        )
