"""Copies host arrays to the GPU."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device_async(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return a tensor on the device with the array's contents. The current stream copies it; the host does not wait.

    A copy from pageable memory would make the host wait until the device is idle. torch does not reuse the pinned
    memory before the device has read it. If the device is the CPU, the tensor shares the array's memory.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
