"""A device whose streams, events, pinned memory and graphs are those of a deferred GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fakes.runners.deferred_gpu import DeferredGpu
from fakes.runners.deferred_work import poison
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from penstock.gpu_node.model.gpu.device import Device

_CPU = torch.device("cpu")


class DeferredDevice(Device):
    """A device of a deferred GPU, with a side stream of its own."""

    def __init__(self, gpu: DeferredGpu) -> None:
        super().__init__(_CPU)
        self._gpu = gpu
        self._side_stream = gpu.new_stream()

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed memory that counts as pinned."""
        with _disable_current_modes():
            return self._gpu.note_host(torch.zeros(*shape, dtype=dtype))

    def pinned_run(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return memory, filled with poison, that kernels use too."""
        with _disable_current_modes():
            return poison(self._gpu.note_host(torch.zeros(*shape, dtype=dtype), is_mapped=True))

    def record_event(self) -> Any:
        """Record an event after the work queued so far."""
        return self._gpu.record()

    def on_side(self) -> Any:
        """Queue work in the side stream."""
        return self._gpu.on(self._side_stream)

    def capture(self, work: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
        """Capture `work` without running it."""
        return self._gpu.capture(work), pool
