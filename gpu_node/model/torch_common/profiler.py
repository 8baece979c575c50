"""Recording of torch's operations, for `penstock profile`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.contract.errors import InvariantError


class TorchProfiler:
    """Records the operations of the thread that starts it, and those of the GPU."""

    def __init__(self) -> None:
        self._running: profile | None = None
        self._recorded: profile | None = None

    def start(self) -> None:
        """Start recording. What was recorded before is dropped."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._recorded = None
        self._running = profile(activities=activities)
        self._running.start()

    def stop(self) -> None:
        """Stop recording, on the thread that started it."""
        if self._running is None:
            raise InvariantError("the profiler was not started")
        self._running.stop()
        self._running, self._recorded = None, self._running

    def write(self, path: Path) -> None:
        """Write what was recorded as a Chrome trace; compressed if the path ends with `.gz`. It may take seconds."""
        if self._recorded is None:
            raise InvariantError("nothing was recorded")
        self._recorded.export_chrome_trace(str(path))
        self._recorded = None
