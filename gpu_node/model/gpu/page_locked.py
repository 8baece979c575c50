"""Host memory that a card reads and writes by itself, of exactly the size that is asked for."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MAPPED_AND_PORTABLE = 0
"""cudaHostRegisterDefault, where card and host share one address space."""


def page_locked(num_bytes: int, device: torch.device) -> Tensor:
    """Zeros [num_bytes] in uint8, at the same address for the card, page-aligned; given back with their last view.

    torch's own allocator would round them up to a power of two. Raises MemoryError where they cannot be had.
    """
    # Shared, as mmap has it by default: a fork does not have pages copied that the card goes on using.
    area = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    tensor = torch.from_numpy(area)
    code = int(_runtime().cudaHostRegister(tensor.data_ptr(), num_bytes, _MAPPED_AND_PORTABLE))
    if code:
        gib = num_bytes / (1 << 30)
        raise MemoryError(f"the host has no {gib:.4g} GiB to lock for {device}: cudaHostRegister failed with {code}")
    # The tensor's storage holds `area`, and that the mapping: an array's finalizers run before its memory goes.
    weakref.finalize(area, _release, tensor.data_ptr(), device).atexit = False
    return tensor


def _release(address: int, device: torch.device) -> None:
    """Once nothing is on its way there any more."""
    torch.cuda.synchronize(device)
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
