"""Page-locked host memory of an exact size, which the GPU reads and writes directly."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.contract.errors import ConfigError

_MAPPED_AND_PORTABLE = 0
"""cudaHostRegisterDefault; GPU and host share one address space."""


def page_locked(num_bytes: int, device: torch.device) -> Tensor:
    """Return page-aligned zeros, [num_bytes] uint8, at the same address on the GPU; freed with their last view.

    torch's own allocator would round the size up to a power of two. Raises MemoryError if the memory cannot be locked.
    """
    # A shared mapping, the default of mmap: after a fork, pages that the GPU still uses are not copied on write.
    area = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    tensor = torch.from_numpy(area)
    code = int(_runtime().cudaHostRegister(tensor.data_ptr(), num_bytes, _MAPPED_AND_PORTABLE))
    if code:
        gib = num_bytes / (1 << 30)
        raise MemoryError(f"cannot lock {gib:.4g} GiB of host memory for {device}: cudaHostRegister failed with {code}")
    # The tensor's storage holds `area`, which holds the mapping. An array's finalizers run before its memory is freed.
    weakref.finalize(area, _release, tensor.data_ptr(), device).atexit = False
    return tensor


def check_host_address(memory: Tensor, device: torch.device) -> None:
    """Check that kernels reach page-locked memory at its host address, as the kernels for host blocks assume.

    Raises ConfigError if the driver gives the memory another address on the GPU, or none.
    """
    address = ctypes.c_uint64()
    pointer = ctypes.c_void_p(memory.data_ptr())
    try:
        # torch does not expose the runtime's cudaHostGetDevicePointer; the driver has the same function.
        code = int(_driver().cuMemHostGetDevicePointer_v2(ctypes.byref(address), pointer, 0))
    except (OSError, AttributeError) as error:
        raise ConfigError(f"swap blocks: the driver of {device} cannot be asked for addresses: {error}") from error
    if code or address.value != memory.data_ptr():
        found = f"error {code}" if code else f"address {address.value:#x} instead of {memory.data_ptr():#x}"
        raise ConfigError(
            f"swap blocks: {device} cannot read host memory where the host does "
            f"(cudaHostGetDevicePointer: {found}); set swap_space_gib and num_swap_blocks to 0"
        )


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _release(address: int, device: torch.device) -> None:
    """Unregister the memory after all copies of the device are complete."""
    torch.cuda.synchronize(device)
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
