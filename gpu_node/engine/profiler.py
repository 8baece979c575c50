"""Records the steps of an engine during a profile. At other times a step only checks whether there is one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.gpu_node.engine.in_flight import RecordedStep, StepTimings
from penstock.gpu_node.model.protocol import ModelRunner, ProfiledRunner

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
    """Records an engine's steps, and the runner's operations in them if the runner supports that."""

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
