"""Measures how long an event loop is held, that is blocked by a callback: a periodic timer fires late by that time.

Wall time alone would also count time in which a busy machine runs other processes. So each hold has three measures:

- `wall` is the delay of the timer.
- `runnable` is `wall` without the time for which the loop's thread waited for a CPU core. It still includes waits for
  Python's global interpreter lock.
- `cpu` is the CPU time of the loop's thread beyond the timer's interval: the loop's own work only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.runtime.histogram import Histogram

if TYPE_CHECKING:
    from prometheus_client import Metric

_LOG = logging.getLogger(__package__)

INTERVAL_S = 0.05
WINDOW_S = 30.0
"""The longest hold is reported over the last one to two windows."""
LONG_HOLD_S = 0.05
"""Holds of at least this length are logged with the loop's stack, if requested."""
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_MAX_FRAMES = 12


@dataclass(frozen=True, slots=True)
class Hold:
    """How long the loop was held, in seconds, by the three measures."""

    wall_s: float = 0.0
    runnable_s: float = 0.0
    cpu_s: float = 0.0

    def longest(self, other: Hold) -> Hold:
        """Return the maximum of both, separately per measure."""
        return Hold(
            max(self.wall_s, other.wall_s), max(self.runnable_s, other.runnable_s), max(self.cpu_s, other.cpu_s)
        )


class LoopWatch:
    """Watches the event loop on which it was started. By default it checks 20 times a second.

    Each check wakes the process, which takes about 0.1 ms of CPU time on busy cores. Holds shorter than the interval
    are seen in part.
    """

    def __init__(self, *, interval_s: float = INTERVAL_S, names_holders: bool = False) -> None:
        """With `names_holders`, a thread logs the loop's stack during long holds."""
        self._interval_s = interval_s
        self._names_holders = names_holders
        self._windows = [Hold(), Hold()]
        self.delays_s = Histogram(BUCKETS_S)
        """The delay of each check."""
        self._timer: asyncio.TimerHandle | None = None
        self._sampler: _Sampler | None = None
        self._schedstat: int | None = None

    @property
    def longest(self) -> Hold:
        """The longest hold of the last 30 to 60 s."""
        return self._windows[0].longest(self._windows[1])

    def start(self) -> None:
        """Start watching the running loop and its thread."""
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
        """Stop watching."""
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
        self.delays_s.note(hold.wall_s)
        if now_s >= self._window_ends_s:
            self._windows = [self._windows[1], Hold()]
            self._window_ends_s = now_s + WINDOW_S
        self._windows[1] = self._windows[1].longest(hold)

    def _queued(self) -> float:
        """Return the total seconds for which this thread was ready but waited for a core; 0 if not reported."""
        if self._schedstat is None:
            return 0.0
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9


class _Sampler:
    """A thread that logs the loop's stack while its timer is overdue."""

    def __init__(self, interval_s: float) -> None:
        self.due_s = time.monotonic() + interval_s
        self._watched = threading.get_ident()
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock loop sampler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        logged_s = 0.0
        while not self._stopped.wait(self._interval_s):
            due_s = self.due_s
            held_s = time.monotonic() - due_s
            if held_s < LONG_HOLD_S or due_s == logged_s:
                continue
            logged_s = due_s
            frame = sys._current_frames().get(self._watched)
            frames = traceback.extract_stack(frame, _MAX_FRAMES) if frame is not None else []
            stack = [f"{one.filename}:{one.lineno} {one.name}" for one in frames]
            _LOG.warning("the event loop is blocked", extra={"held_ms": round(held_s * 1000), "stack": stack})


def loop_metrics(late_name: str, hold_name: str, watch: LoopWatch) -> Iterator[Metric]:
    """Yield a histogram of timer delays, named `late_name`, and gauges of the longest hold, named `hold_name`."""
    from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily

    text = "Delay of the event loop's timers."
    yield HistogramMetricFamily(late_name, text, buckets=watch.delays_s.buckets, sum_value=watch.delays_s.total)
    text = "Longest time that the event loop was blocked in the last 30 to 60 s, by clock; see the runbook."
    family = GaugeMetricFamily(hold_name, text, labels=("clock",))
    hold = watch.longest
    for clock, value in (("wall", hold.wall_s), ("runnable", hold.runnable_s), ("cpu", hold.cpu_s)):
        family.add_metric((clock,), value)
    yield family
