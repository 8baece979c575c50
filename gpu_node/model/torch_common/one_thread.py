"""The thread of a torch runner on the CPU, on which all its steps run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from penstock.gpu_node.model.torch_common.profiler import TorchProfiler
from penstock.kernels.cpu.probe import usable_cores


class OneThreadRunner:
    """The base of torch runners on the CPU: one worker thread runs each step, and torch's operations release the GIL.

    Only this thread computes, because every thread that calls torch keeps its own team of OpenMP threads.
    """

    max_in_flight = 1

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "penstock-torch")
        self._profiler = TorchProfiler()

    @property
    def leaves_core_free(self) -> bool:
        """Whether steps use fewer threads than there are cores."""
        return torch.get_num_threads() < usable_cores()

    def bind_thread(self) -> None:
        """Do nothing: steps run on a separate thread."""

    def start_profile(self) -> None:
        """Start recording the operations of steps."""
        self.thread.submit(self._profiler.start).result()

    def stop_profile(self) -> None:
        """Stop recording."""
        self.thread.submit(self._profiler.stop).result()

    def write_profile(self, path: Path) -> None:
        """Write what was recorded as a compressed Chrome trace."""
        self._profiler.write(path)
