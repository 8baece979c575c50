"""Pinned memory through which steps reach the GPU, and their tokens the host."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.gpu_node.model.gpu.device import Device, DeviceEvent
from penstock.gpu_node.model.gpu.inputs import Ints, StepInputs, size_of


class StagingBuffer:
    """Pinned memory that transfers one step's inputs to the device and its tokens back."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._packed = device.pinned(1 << 12, dtype=torch.int32)
        self._tokens = device.pinned(0, dtype=torch.int32)
        self.copied: DeviceEvent = device.record_event()

    def wait(self) -> None:
        """Wait until the last step has finished with the buffer."""
        self.copied.wait()

    def packed(self, step: StepInputs[Ints]) -> Tensor:
        """Return pinned memory that is large enough for a packed step."""
        needed = size_of(step)
        if len(self._packed) < needed:
            self._packed = self._device.pinned(2 * needed, dtype=torch.int32)
        return self._packed

    def copy_back(self, tokens: Tensor) -> Tensor:
        """Start to copy tokens to the host; the result is valid once the event `copied` is reached."""
        if len(self._tokens) < len(tokens):
            self._tokens = self._device.pinned(2 * len(tokens), dtype=torch.int32)
        here = self._tokens[: len(tokens)]
        here.copy_(tokens, non_blocking=True)
        self.copied = self._device.record_event()
        return here
