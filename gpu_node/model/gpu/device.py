"""What a card has and the CPU does not: streams, events, pinned memory and graphs."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.gpu_node.model.gpu.page_locked import page_locked

OLDEST_CARD = 8, 0
"""The compute capability that the kernels want: before Ampere, Triton knows no bfloat16."""


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Block the calling thread until it is reached."""

    def hold(self) -> None:
        """Let the current stream go no further before it is reached."""

    def ms_since(self, earlier: DeviceEvent) -> float:
        """Time between two marks that were reached."""


class Device:
    """A card, or the CPU in its place, where work is done by the time that it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.is_card = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if self.is_card else None  # type: ignore[no-untyped-call]

    @property
    def has_float8(self) -> bool:
        """Whether kernels may convert to and multiply float8."""
        return not self.is_card or torch.cuda.get_device_capability(self.torch) >= (8, 9)

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that the card copies from and to by itself."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=self.is_card)

    def pinned_run(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """The same for what is large: `pinned` takes the next power of two."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not self.is_card or not num_bytes:
            return torch.zeros(*shape, dtype=dtype)
        return page_locked(num_bytes, self.torch).view(dtype).view(shape)

    def mark(self) -> DeviceEvent:
        """The end of what the current stream was given so far."""
        return _GpuEvent() if self.is_card else _CpuEvent()

    def on_side(self) -> AbstractContextManager[object]:
        """Give work to a second stream; what it needs of the other's must be marked and held."""
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def capture(self, work: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
        """What does `work` again on the same memory, and the memory pool to hand to the next capture."""
        if not self.is_card:
            return work, None
        # Kernels are compiled, and libraries allocate what they need, before the capture.
        work()
        torch.cuda.synchronize(self.torch)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=pool):
            work()
        return graph.replay, graph.pool()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let no garbage be found: what gives memory back to the card may wait for it, which ends a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _GpuEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def hold(self) -> None:
        self._event.wait()

    def ms_since(self, earlier: DeviceEvent) -> float:
        return float(earlier._event.elapsed_time(self._event)) if isinstance(earlier, _GpuEvent) else 0.0


class _CpuEvent:
    def __init__(self) -> None:
        self._reached_s = time.perf_counter()

    def wait(self) -> None:
        pass

    def hold(self) -> None:
        pass

    def ms_since(self, earlier: DeviceEvent) -> float:
        return (self._reached_s - earlier._reached_s) * 1e3 if isinstance(earlier, _CpuEvent) else 0.0
