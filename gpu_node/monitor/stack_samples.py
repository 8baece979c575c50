"""Samples of what each thread of this process runs, as the events of a Chrome trace."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

INTERVAL_S = 0.005
MAX_EVENTS = 200_000
MAX_DEPTH = 48
"""Frames of a thread that are kept, the innermost ones."""

Frame = tuple[str, str, int]
"""Function, file, and the line where the function begins."""


@dataclass(slots=True)
class _Open:
    frame: Frame
    started_s: float


@dataclass(slots=True)
class StackSamples:
    """The samples of a profile. Consecutive samples of a call are one event. Times are of `time.perf_counter`."""

    events: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[int, list[_Open]] = field(default_factory=dict)

    def take(self, now_s: float, *, without: int) -> None:
        """Take one sample of all threads but one."""
        frames = sys._current_frames()
        for thread_id in self._open.keys() | frames.keys():
            if thread_id != without:
                self._note(thread_id, _stack(frames.get(thread_id)), now_s)

    def close(self, now_s: float) -> None:
        """End all calls that are open."""
        for thread_id in list(self._open):
            self._note(thread_id, [], now_s)

    def _note(self, thread_id: int, stack: list[Frame], now_s: float) -> None:
        was = self._open.setdefault(thread_id, [])
        num_same = 0
        while num_same < min(len(was), len(stack)) and was[num_same].frame == stack[num_same]:
            num_same += 1
        for one in reversed(was[num_same:]):
            if len(self.events) < MAX_EVENTS:
                self.events.append(_event(one, thread_id, now_s))
        was[num_same:] = [_Open(frame, now_s) for frame in stack[num_same:]]


def record_stacks(stopped: threading.Event) -> StackSamples:
    """Sample all other threads until the event. Run it on a thread of its own."""
    samples, own = StackSamples(), threading.get_ident()
    while not stopped.wait(INTERVAL_S):
        samples.take(time.perf_counter(), without=own)
    samples.close(time.perf_counter())
    return samples


def _stack(frame: FrameType | None) -> list[Frame]:
    """Return the frames of a thread, the outermost of those that are kept first."""
    stack: list[Frame] = []
    while frame is not None and len(stack) < MAX_DEPTH:
        code = frame.f_code
        stack.append((code.co_qualname, code.co_filename, code.co_firstlineno))
        frame = frame.f_back
    return stack[::-1]


def _event(call: _Open, thread_id: int, now_s: float) -> dict[str, Any]:
    name, file, line = call.frame
    times = {"ts": call.started_s * 1e6, "dur": (now_s - call.started_s) * 1e6}
    return {"ph": "X", "name": name, "cat": "python", "tid": thread_id, **times, "args": {"at": f"{file}:{line}"}}
