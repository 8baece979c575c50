"""Steps that are in flight, the times of their parts, and profiles."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypedDict, runtime_checkable

from penstock.gpu_node.engine.steps import InFlightStep
from penstock.gpu_node.model.protocol import ModelRunner, ProfiledRunner, StepResult
from penstock.runtime.histogram import Histogram

_WINDOW = 256
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0)
"""Upper bounds of the histogram of step times."""
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histograms of a step's sequences and tokens."""
PARTS = ("schedule", "prepare", "copies", "forward", "sample", "output")
"""The parts of a step, in the order in which they run; `EngineStats` describes them."""


class SampleWindow:
    """One time for each of the last few hundred steps. As a context manager it measures one."""

    def __init__(self) -> None:
        self._values_ms: deque[float] = deque(maxlen=_WINDOW)
        self._entered_s = 0.0
        self.total_ms = 0.0
        """Sum of the times of all steps, not only of the last ones."""

    def add(self, value_ms: float) -> None:
        """Add a step's time."""
        self._values_ms.append(value_ms)
        self.total_ms += value_ms

    @property
    def last(self) -> float:
        """The newest time; 0 before the first."""
        return self._values_ms[-1] if self._values_ms else 0.0

    def mean(self) -> float:
        """Return the mean; 0 before the first time."""
        return sum(self._values_ms) / max(1, len(self._values_ms))

    def percentile(self, percent: int) -> float:
        """Return the time that `percent` percent of the steps stay below; 0 before the first."""
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
    part_seconds: dict[str, float]
    eager_steps: dict[str, int]
    step_seconds: Histogram
    batch_sequences: Histogram
    batch_tokens: Histogram


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The times of one step. `EngineStats` describes the parts."""

    ended_s: float
    """When its tokens were committed, by `time.perf_counter`."""
    step_ms: float
    copies_ms: float
    forward_ms: float
    sample_ms: float
    schedule_ms: float
    prepare_ms: float
    output_ms: float
    """The time that the outputs of the step before took."""
    num_sequences: int
    num_prefill_tokens: int
    num_tokens: int
    """Tokens sampled, those of choices that have ended included."""


@dataclass(slots=True)
class StepTimings:
    """Counters and times of steps; `EngineStats` describes each part."""

    steps: int = 0
    num_failed_steps: int = 0
    num_memory_failures: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    copied_blocks: int = 0
    eager_steps: Counter[str] = field(default_factory=Counter)

    step: SampleWindow = field(default_factory=SampleWindow)
    copies: SampleWindow = field(default_factory=SampleWindow)
    schedule: SampleWindow = field(default_factory=SampleWindow)
    prepare: SampleWindow = field(default_factory=SampleWindow)
    forward: SampleWindow = field(default_factory=SampleWindow)
    sample: SampleWindow = field(default_factory=SampleWindow)
    output: SampleWindow = field(default_factory=SampleWindow)

    step_seconds: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
    batch_sequences: Histogram = field(default_factory=lambda: Histogram(BATCH_SIZES))
    batch_tokens: Histogram = field(default_factory=lambda: Histogram(BATCH_SIZES))
    recorded: list[RecordedStep] | None = None
    """The steps of a profile while there is one."""

    def note_completed(self, in_flight: InFlightStep, result: StepResult, num_tokens: int) -> None:
        """Count a computed step that yielded `num_tokens` tokens, those of choices that have ended included."""
        self.steps += 1
        self.prefill_tokens += in_flight.step.num_prefill_tokens
        self.copied_blocks += len(in_flight.step.copies)
        if result.eager is not None:
            self.eager_steps[result.eager] += 1
        age_ms = in_flight.age_ms
        self.step.add(age_ms)
        self.step_seconds.note(age_ms / 1000)
        self.batch_sequences.note(len(in_flight.step.seqs))
        self.batch_tokens.note(in_flight.step.num_prefill_tokens + num_tokens)
        self.copies.add(result.copy_ms)
        self.forward.add(result.forward_ms)
        self.sample.add(result.sample_ms)
        if self.recorded is not None:
            parts = result.copy_ms, result.forward_ms, result.sample_ms
            own = self.schedule.last, self.prepare.last, self.output.last
            sizes = len(in_flight.step.seqs), in_flight.step.num_prefill_tokens, num_tokens
            self.recorded.append(RecordedStep(time.perf_counter(), age_ms, *parts, *own, *sizes))

    def note_failed(self, error: Exception) -> None:
        """Count a failed step."""
        self.num_failed_steps += 1
        self.num_memory_failures += isinstance(error, MemoryError)

    def stats(self) -> StepStats:
        """Return the counters and times as fields of EngineStats."""
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
            part_seconds={name: getattr(self, name).total_ms / 1000 for name in PARTS},
            eager_steps=dict(self.eager_steps),
            step_seconds=self.step_seconds.copy(),
            batch_sequences=self.batch_sequences.copy(),
            batch_tokens=self.batch_tokens.copy(),
        )


MAX_STEPS = 20_000
"""Steps that a profile keeps."""
MAX_STEPS_OF_RUNNER = 50
"""The same where the runner records its operations: thousands for each step, which take half a second to write."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The steps and requests that an engine recorded."""

    steps: tuple[RecordedStep, ...]
    has_operations: bool
    """Whether the runner recorded its operations."""


@runtime_checkable
class ProfiledEngine(Protocol):
    """An engine that can record its steps."""

    @property
    def profiler(self) -> EngineProfiler:
        """The recorder of its steps."""


class EngineProfiler:
    """Records an engine's steps, and the runner's operations in them if the runner supports that.

    Without a profile, a step only checks whether there is one.
    """

    def __init__(self, timings: StepTimings, runner: ModelRunner) -> None:
        self._timings = timings
        self._runner = runner if isinstance(runner, ProfiledRunner) else None
        self._recorded: list[RecordedStep] = []

    @property
    def is_full(self) -> bool:
        """Whether it has recorded as many steps as it keeps. Safe on any thread."""
        return len(self._recorded) >= (MAX_STEPS if self._runner is None else MAX_STEPS_OF_RUNNER)

    def start(self) -> None:
        """Start recording, on the engine's thread."""
        if self._runner is not None:
            self._runner.start_profile()
        self._timings.recorded = self._recorded = []

    def stop(self) -> EngineProfile:
        """Stop recording, on the engine's thread."""
        self._timings.recorded = None
        if self._runner is not None:
            self._runner.stop_profile()
        return EngineProfile(tuple(self._recorded), has_operations=self._runner is not None)

    def write_operations(self, path: Path) -> None:
        """Write the runner's operations as a Chrome trace. It may take seconds: call it on a thread of its own."""
        if self._runner is not None:
            self._runner.write_profile(path)
