"""How long an event loop is held up: a timer that comes late tells of what ran in its place.

Wall time alone would blame a loop for what it did not do: on a busy machine the system runs other processes. So a hold
is told in three ways. `wall` is how late the timer was. `runnable` is that without the time for which the system kept
the loop's thread waiting for a core; it still contains waits for Python's lock. `cpu` is what the loop's own thread
computed beyond the timer's interval: work of the loop, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass

log = logging.getLogger(__name__)

INTERVAL_S = 0.02
WINDOW_S = 30.0
"""Longest holds are told of the last one to two windows."""
LONG_HOLD_S = 0.05
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_MAX_FRAMES = 12


@dataclass(frozen=True, slots=True)
class Hold:
    """The longest of some time, in seconds."""

    wall_s: float = 0.0
    runnable_s: float = 0.0
    cpu_s: float = 0.0

    def longest(self, other: Hold) -> Hold:
        """The longer of two, each by itself."""
        return Hold(
            max(self.wall_s, other.wall_s), max(self.runnable_s, other.runnable_s), max(self.cpu_s, other.cpu_s)
        )


class LoopWatch:
    """Watches the loop that it was started on. A look takes about five microseconds, fifty times a second."""

    def __init__(self, *, interval_s: float = INTERVAL_S, names_holders: bool = False) -> None:
        """`names_holders`: a thread looks at what the loop runs while it is held, and logs it."""
        self._interval_s = interval_s
        self._names_holders = names_holders
        self._windows = [Hold(), Hold()]
        self.counts = [0] * (len(BUCKETS_S) + 1)
        """Looks by how late they were, in the buckets above and one beyond them."""
        self.total_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._sampler: _Sampler | None = None
        self._schedstat: int | None = None

    @property
    def longest(self) -> Hold:
        """The longest hold of the last half minute to minute."""
        return self._windows[0].longest(self._windows[1])

    def start(self) -> None:
        """Begin, on the running loop and its thread."""
        self._loop = asyncio.get_running_loop()
        with suppress(OSError):
            self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        if self._names_holders:
            self._sampler = _Sampler(self._interval_s)
            self._sampler.start()
        self._window_ends_s = self._loop.time() + WINDOW_S
        self._cpu_s, self._queued_s = time.thread_time(), self._queued()
        self._set_timer()

    def stop(self) -> None:
        """End."""
        if self._timer is not None:
            self._timer.cancel()
        if self._sampler is not None:
            self._sampler.stop()
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None

    def _set_timer(self) -> None:
        self._due_s = self._loop.time() + self._interval_s
        if self._sampler is not None:
            self._sampler.due_s = time.monotonic() + self._interval_s
        self._timer = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        now_s, cpu_s, queued_s = self._loop.time(), time.thread_time(), self._queued()
        late_s = max(0.0, now_s - self._due_s)
        runnable_s = max(0.0, late_s - (queued_s - self._queued_s))
        self._note(Hold(late_s, runnable_s, max(0.0, cpu_s - self._cpu_s - self._interval_s)), now_s)
        self._cpu_s, self._queued_s = cpu_s, queued_s
        self._set_timer()

    def _note(self, hold: Hold, now_s: float) -> None:
        self.counts[next((i for i, bound_s in enumerate(BUCKETS_S) if hold.wall_s <= bound_s), len(BUCKETS_S))] += 1
        self.total_s += hold.wall_s
        if now_s >= self._window_ends_s:
            self._windows = [self._windows[1], Hold()]
            self._window_ends_s = now_s + WINDOW_S
        self._windows[1] = self._windows[1].longest(hold)

    def _queued(self) -> float:
        """Seconds for which this thread was ready and had no core; 0 where the system does not tell."""
        if self._schedstat is None:
            return 0.0
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9


class _Sampler:
    """A thread that looks at the loop's stack while its timer is overdue."""

    def __init__(self, interval_s: float) -> None:
        self.due_s = time.monotonic() + interval_s
        self._watched = threading.get_ident()
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock loop sampler", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        told_s = 0.0
        while not self._stopped.wait(self._interval_s):
            due_s = self.due_s
            held_s = time.monotonic() - due_s
            if held_s < LONG_HOLD_S or due_s == told_s:
                continue
            told_s = due_s
            frame = sys._current_frames().get(self._watched)
            frames = traceback.extract_stack(frame, _MAX_FRAMES) if frame is not None else []
            stack = [f"{one.filename}:{one.lineno} {one.name}" for one in frames]
            log.warning("the event loop is held", extra={"held_ms": round(held_s * 1000), "stack": stack})
