"""Arrays of the host on their way to a card."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device, behind what the current stream was given and without waiting for that.

    Out of pageable memory a copy makes the host wait until the device has nothing else to do. torch keeps pinned memory
    from being used again before the device has read it. Where the device is the CPU, the array itself.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
