"""The queued work of a deferred GPU, and the poison in memory that is not written yet."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class Site(NamedTuple):
    """A line of a source file."""

    file: str
    line: int


class RaceError(AssertionError):
    """The host changed pinned memory before the device read it, or read the device's result before it was written."""


class EventHost(Protocol):
    """Runs the work before an event."""

    def omits(self, caller: FrameType) -> bool: ...
    def run_until(self, event: Event) -> None: ...
    def enqueue(self, item: Item) -> None: ...


@dataclass(eq=False)
class Event:
    """A point in a stream's queue."""

    gpu: EventHost
    stream: int
    is_reached: bool = False

    def wait(self) -> None:
        if not self.gpu.omits(sys._getframe(1)):
            self.gpu.run_until(self)

    def hold(self) -> None:
        if not self.gpu.omits(sys._getframe(1)):
            self.gpu.enqueue(Hold(self))

    def ms_since(self, earlier: Any) -> float:
        del earlier
        return 0.0


@dataclass
class EventPoint:
    event: Event


@dataclass
class Hold:
    event: Event


@dataclass
class Work:
    name: str
    run: Callable[[], object]
    reads: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Pinned memory, and what it held when the work was queued."""


Item = EventPoint | Hold | Work


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def poison(x: Tensor) -> Tensor:
    """Fill a tensor with bytes of ones: NaN, or -1."""
    with _disable_current_modes(), torch.inference_mode():
        if x.dtype == torch.bool:
            return x.fill_(True)
        return x.fill_(float("nan") if x.is_floating_point() else (255 if x.dtype == torch.uint8 else -1))


def on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs | {"device": torch.device("meta")} if "device" in kwargs else kwargs


def shape_only(x: Any) -> Any:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
