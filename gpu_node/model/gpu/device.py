"""Streams, events, page-locked memory and graphs of a GPU, with stand-ins that do nothing on the CPU."""

from __future__ import annotations

import ctypes
import math
import mmap
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.contract.errors import ConfigError
from penstock.runtime.process_memory import no_collection

MIN_COMPUTE_CAPABILITY = 8, 0
"""Ampere: Triton does not support bfloat16 on earlier GPUs."""


_MAPPED_AND_PORTABLE = 0
"""cudaHostRegisterDefault; GPU and host share one address space."""


def page_locked(num_bytes: int, device: torch.device) -> Tensor:
    """Return page-aligned zeros, [num_bytes] uint8, at the same address on the GPU; freed with their last view.

    torch's own allocator would round the size up to a power of two. Raises MemoryError if the memory cannot be locked.
    """
    # A shared mapping, the default of mmap: after a fork, pages that the GPU still uses are not copied on write.
    mapping = mmap.mmap(-1, num_bytes)
    area = np.frombuffer(mapping, np.uint8)
    tensor = torch.from_numpy(area)
    code = int(_runtime().cudaHostRegister(tensor.data_ptr(), num_bytes, _MAPPED_AND_PORTABLE))
    if code:
        gib = num_bytes / (1 << 30)
        raise MemoryError(f"cannot lock {gib:.4g} GiB of host memory for {device}: cudaHostRegister failed with {code}")
    # The tensor's storage holds `area`. The finalizer holds the mapping, so that it is unregistered while it is mapped.
    weakref.finalize(area, _release, tensor.data_ptr(), device, mapping).atexit = False
    return tensor


def check_host_address(memory: Tensor, device: torch.device) -> None:
    """Check that kernels reach page-locked memory at its host address, as the kernels for host blocks assume.

    Raises ConfigError if the driver gives the memory another address on the GPU, or none.
    """
    address = ctypes.c_uint64()
    pointer = ctypes.c_void_p(memory.data_ptr())
    try:
        # torch does not expose the runtime's cudaHostGetDevicePointer; the driver has the same function.
        driver = ctypes.CDLL("libcuda.so.1")
        code = int(driver.cuMemHostGetDevicePointer_v2(ctypes.byref(address), pointer, 0))
    except (OSError, AttributeError) as error:
        raise ConfigError(f"swap blocks: the driver of {device} cannot be asked for addresses: {error}") from error
    if code or address.value != memory.data_ptr():
        found = f"error {code}" if code else f"address {address.value:#x} instead of {memory.data_ptr():#x}"
        raise ConfigError(
            f"swap blocks: {device} cannot read host memory where the host does "
            f"(cudaHostGetDevicePointer: {found}); set swap_space_gib and num_swap_blocks to 0"
        )


def _release(address: int, device: torch.device, _mapping: mmap.mmap) -> None:
    """Unregister the memory after all copies of the device are complete."""
    torch.cuda.synchronize(device)
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class DeviceEvent(Protocol):
    """An event recorded in a stream, like a CUDA event."""

    def wait(self) -> None:
        """Block the calling thread until the event is reached."""

    def hold(self) -> None:
        """Make the current stream wait for the event."""

    def ms_since(self, earlier: DeviceEvent) -> float:
        """Return the milliseconds between two events; both must have been reached."""


class Device:
    """A GPU, or the CPU as its stand-in, where all work completes at once."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.is_gpu = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if self.is_gpu else None  # type: ignore[no-untyped-call]

    def make_current(self) -> None:
        """Let the calling thread's kernels and events go to this GPU, which CUDA decides for each thread alone."""
        if self.is_gpu:
            torch.cuda.set_device(self.torch)

    @property
    def has_float8(self) -> bool:
        """Whether kernels can convert to float8 and multiply it."""
        return not self.is_gpu or torch.cuda.get_device_capability(self.torch) >= (8, 9)

    @property
    def uuid(self) -> str:
        """The GPU, as its driver names it; empty on the CPU."""
        return f"GPU-{torch.cuda.get_device_properties(self.torch).uuid}" if self.is_gpu else ""

    def allocated_bytes(self) -> int:
        """Return the bytes of the tensors on the GPU; 0 on the CPU."""
        return torch.cuda.memory_allocated(self.torch) if self.is_gpu else 0

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed pinned host memory, which the GPU copies from and to asynchronously."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=self.is_gpu)

    def pinned_run(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed pinned host memory of the exact size; `pinned` rounds up to a power of two."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not self.is_gpu or not num_bytes:
            return torch.zeros(*shape, dtype=dtype)
        return page_locked(num_bytes, self.torch).view(dtype).view(shape)

    def check_host_address(self, memory: Tensor) -> None:
        """Check that kernels reach pinned memory at its host address. Raises ConfigError."""
        if self.is_gpu:
            check_host_address(memory, self.torch)

    def record_event(self) -> DeviceEvent:
        """Record an event after the work submitted to the current stream so far."""
        return _GpuEvent() if self.is_gpu else _CpuEvent()

    def on_side(self) -> AbstractContextManager[object]:
        """Submit work to the side stream. Order it against the main stream with `record_event` and `hold`."""
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def capture(self, work: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
        """Capture `work` as a CUDA graph; return its replay function and the memory pool for the next capture."""
        if not self.is_gpu:
            return work, None
        # Run once before the capture, so that kernels are compiled and libraries allocate their memory.
        work()
        torch.cuda.synchronize(self.torch)
        graph = torch.cuda.CUDAGraph()
        # A finalizer that frees GPU memory may synchronize, which aborts a capture.
        with no_collection(), torch.cuda.graph(graph, pool=pool):
            work()
        return graph.replay, graph.pool()


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
