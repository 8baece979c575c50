"""Steps that may still be running on the GPU, and the pinned memory that carries their inputs and tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.gpu_node.model.gpu.device import Device, DeviceEvent
from penstock.gpu_node.model.gpu.inputs import Ints, StepInputs, size_of
from penstock.gpu_node.model.protocol import StepResult
from penstock.gpu_node.model.torch_common.logprobs import to_numpy
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory

OnHost = tuple[Tensor, Tensor] | None
"""The two arrays of `Logprobs` in pinned memory; None where no row wants logprobs."""


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
        """Start copying tokens to the host; the result is valid once the event `copied` is reached."""
        if len(self._tokens) < len(tokens):
            self._tokens = self._device.pinned(2 * len(tokens), dtype=torch.int32)
        here = self._tokens[: len(tokens)]
        here.copy_(tokens, non_blocking=True)
        self.copied = self._device.record_event()
        return here


class InFlightStep:
    """A step that may still be running. Its tokens are in a staging buffer that the step after the next reuses."""

    def __init__(self, started: DeviceEvent, copied: DeviceEvent) -> None:
        self._started = started
        self._copied = copied
        self._done = copied
        self._tokens = torch.empty(0, dtype=torch.int32)
        self.deferred: Callable[[], None] | None = None
        """Work that is still to be submitted to the device."""
        self._logprobs: tuple[OnHost, OnHost] = None, None
        self.hidden: Tensor | None = None
        """The hidden states of the pooled tokens in pinned memory."""
        self.eager: str | None = None
        """Why the step did not run as a graph; None if it did."""

    def set_tokens(self, tokens: Tensor, done: DeviceEvent) -> None:
        """Set the pinned tensor that holds the tokens once the event `done` is reached."""
        self._tokens, self._done = tokens, done

    def note_logprobs(self, logprobs: OnHost, scores: OnHost) -> None:
        """Keep the logprobs of the sampling rows and of the scored tokens."""
        self._logprobs = logprobs, scores

    @translate_out_of_memory()
    def run_deferred(self) -> None:
        """Submit the deferred work, if any, to the device."""
        deferred, self.deferred = self.deferred, None
        if deferred is not None:
            deferred()

    def ms_since(self, earlier: InFlightStep) -> float:
        """Return the milliseconds of device time between the ends of two steps whose results were waited for."""
        return self._done.ms_since(earlier._done)

    def result(self) -> StepResult:
        """Wait for the step and return its tokens."""
        self.run_deferred()
        self._done.wait()
        # Sampling is part of the same graph as the forward pass.
        forward_ms, copy_ms = self._done.ms_since(self._copied), self._copied.ms_since(self._started)
        logprobs, scores = (None if tensors is None else to_numpy(*tensors) for tensors in self._logprobs)
        tokens = self._tokens.numpy().copy()
        hidden = None if self.hidden is None else self.hidden.numpy()
        return StepResult(tokens, forward_ms, 0.0, copy_ms, logprobs, scores, hidden, self.eager)
