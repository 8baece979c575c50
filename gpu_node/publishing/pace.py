"""When the tokens of running jobs are sent: for all streams together, as often as the CPU time for sending allows.

Each send wakes the node, Redis and the readers. That costs CPU time and cache space of the cores on which the
engine computes. So the share of a core that the node spends on sending is limited: the interval between two sends is
their expected CPU time divided by that limit. Where a core is free, the limit is high, and tokens leave at every step.
No token waits longer than `max_interval_s`, whatever that costs.

First tokens and ends leave at once, since readers wait for them. The exception is a burst of them, which would wake all
processes continuously.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Alarm:
    """A timer that rings at the earliest time set since its last ring. It belongs to the running event loop."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._on_ring = ring

    def set(self, delay_s: float) -> None:
        """Ring after at most `delay_s` seconds."""
        # Rounded up to milliseconds, the resolution of uvloop's timers: a ring before the time would find nothing due.
        at_s = math.ceil((self._loop.time() + delay_s) * 1000) / 1000
        if self._timer is not None:
            if self._timer.when() <= at_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._on_ring()


SEND_S = 200e-6
CHUNK_S = 20e-6
"""First estimate: CPU seconds of each send, and of each chunk in it. Measured on busy cores."""
RATE = 0.05
"""Weight of the newest send in the learned ratio."""
MAX_RATIO = 8.0
"""Bound of what one send teaches, since other work of the event loop may fall into its time."""


class SendCost:
    """Expected CPU seconds of a send on the event loop: an estimate times a ratio learned from measured sends."""

    def __init__(self) -> None:
        self._ratio = 1.0

    def of(self, num_chunks: int) -> float:
        """Return the expected CPU seconds of a send with this number of chunks."""
        return self._ratio * (SEND_S + num_chunks * CHUNK_S)

    def note(self, num_chunks: int, cpu_s: float) -> None:
        """Learn from a send that took `cpu_s`."""
        ratio = cpu_s / (SEND_S + num_chunks * CHUNK_S)
        self._ratio += RATE * (min(ratio, MAX_RATIO) - self._ratio)


BUSY_SHARE = 0.03
"""Share of a core that a node may spend on sending while its engine computes on all cores."""
FREE_SHARE = 0.25
"""The same if the engine leaves a core free. The core also runs Redis and a gateway, which take three times as much."""
FEW_STREAMS, FEW_INTERVAL_S = 16, 0.02
MANY_STREAMS, MANY_INTERVAL_S = 64, 0.05
"""Longest intervals for these numbers of streams. 20 ms is faster than a screen displays tokens."""
MAX_SHARE_S = 0.01
"""Time that one send counts for, so that first tokens and ends cause at most 100 a second. With few streams it
counts for less, since it then delays little."""
MAX_STREAMS_PER_S = 800
MAX_AHEAD_S = 0.07
"""First tokens and ends wait once this much time is booked: after eight sends, or more with few streams."""


def max_interval_s(num_streams: int) -> float:
    """Return the longest interval between two sends: constant for few streams, then growing with their number."""
    slope_s = (MANY_INTERVAL_S - FEW_INTERVAL_S) / (MANY_STREAMS - FEW_STREAMS)
    return FEW_INTERVAL_S + max(0, num_streams - FEW_STREAMS) * slope_s


class Pace:
    """Times of sends, in seconds on a monotonic clock.

    First tokens and ends are paced by the generic cell rate algorithm (ITU-T I.371). Each send books its share of
    time after the earlier ones. A first token or end waits while more than MAX_AHEAD_S is booked.
    """

    def __init__(self, longest_interval_s: float, *, max_cpu_share: float) -> None:
        """`longest_interval_s`: longest time that a token waits. `max_cpu_share`: share of a core for sending."""
        self._longest_interval_s = longest_interval_s
        self.max_cpu_share = max_cpu_share
        self.cost = SendCost()
        self._all_sent_s = self._booked_until_s = -math.inf
        self._num_streams = 0

    def interval_s(self, num_streams: int = 0) -> float:
        """Return the interval between two sends. The streams of the last send count too."""
        num_streams = max(num_streams, self._num_streams)
        affordable_s = self.cost.of(num_streams) / self.max_cpu_share
        return min(self._longest_interval_s, max_interval_s(num_streams), affordable_s)

    def until_next_s(self, num_pending: int, now_s: float, *, reader_waits: bool = False) -> float:
        """Return the seconds until `num_pending` streams are sent together; 0 or less: now.

        `reader_waits`: until first tokens and ends may be sent. The streams of the last send count too, even if
        only few have new tokens yet, since the others will have some soon.
        """
        due_s = self._all_sent_s + self.interval_s(num_pending)
        if reader_waits:
            due_s = min(due_s, self._booked_until_s - MAX_AHEAD_S)
        return due_s - now_s

    def note(self, now_s: float, *, num_streams: int | None) -> None:
        """Note a send to `num_streams` streams; None: only of first tokens and ends."""
        if num_streams is not None:
            self._all_sent_s = now_s
            self._num_streams = num_streams
        share_s = min(MAX_SHARE_S, self._num_streams / MAX_STREAMS_PER_S)
        self._booked_until_s = min(max(self._booked_until_s, now_s), now_s + MAX_AHEAD_S) + share_s


def new_pace(longest_interval_s: float, *, leaves_core_free: bool) -> Pace:
    """Return the pace of a node whose engine leaves a core free or computes on all of them."""
    return Pace(longest_interval_s, max_cpu_share=FREE_SHARE if leaves_core_free else BUSY_SHARE)
