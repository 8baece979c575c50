"""When, and in which calls, the tokens of running jobs are published: for all streams together, and less often the
more streams there are.

Each publication wakes the node, Redis and the readers. That costs processor time and cache space of the cores on which
the engine computes. So a node publishes about MAX_CHUNKS_PER_S chunks per second, whatever its number of streams,
within the shortest and longest interval allowed. First tokens and ends leave at once, since readers wait for them. The
exception is a burst of them, which would wake all processes continuously.
"""

from __future__ import annotations

import math

from penstock.gpu_node.ledger import HeldJob
from penstock.queue.broker.node import MAX_EMIT_JOBS, Emission

MAX_EMIT_BYTES = 4 << 20
"""Limit of one emit call, so that a backlog after an outage does not block Redis."""
MAX_CHUNKS_PER_S = 200
MIN_INTERVAL_S = 0.02
"""Faster than a screen displays tokens."""
MAX_SHARE_S = 0.01
"""Time that one publication counts for, so that first tokens and ends cause at most 100 a second. With few streams it
counts for less, since it then delays little."""
MAX_STREAMS_PER_S = 800
MAX_AHEAD_S = 0.07
"""First tokens and ends wait once this much time is booked: after eight publications, or more with few streams."""


class Pace:
    """Times of publications, in seconds on a monotonic clock.

    First tokens and ends are paced by the generic cell rate algorithm (ITU-T I.371). Each publication books its share
    of time after the earlier ones. A first token or end waits while more than MAX_AHEAD_S is booked.
    """

    def __init__(self, max_interval_s: float) -> None:
        """`max_interval_s`: longest time that a token waits."""
        self._max_interval_s = max_interval_s
        self._all_published_s = self._booked_until_s = -math.inf
        self._num_streams = 0

    def until_next_s(self, num_pending: int, now_s: float, *, reader_waits: bool = False) -> float:
        """Return the seconds until `num_pending` streams are published together; 0 or less: now.

        `reader_waits`: until first tokens and ends may be published. The streams of the last publication count too,
        even if only few have new tokens yet, since the others will have some soon.
        """
        num_streams = max(num_pending, self._num_streams)
        interval_s = min(self._max_interval_s, max(MIN_INTERVAL_S, num_streams / MAX_CHUNKS_PER_S))
        due_s = self._all_published_s + interval_s
        if reader_waits:
            due_s = min(due_s, self._booked_until_s - MAX_AHEAD_S)
        return due_s - now_s

    def note(self, now_s: float, *, num_streams: int | None) -> None:
        """Note a publication to `num_streams` streams; None: only of first tokens and ends."""
        if num_streams is not None:
            self._all_published_s = now_s
            self._num_streams = num_streams
        share_s = min(MAX_SHARE_S, self._num_streams / MAX_STREAMS_PER_S)
        self._booked_until_s = min(max(self._booked_until_s, now_s), now_s + MAX_AHEAD_S) + share_s


def in_calls(pairs: list[tuple[HeldJob, Emission]]) -> list[list[tuple[HeldJob, Emission]]]:
    """Split emissions into calls, by number of jobs and by bytes."""
    parts: list[list[tuple[HeldJob, Emission]]] = []
    num_bytes = 0
    for pair in pairs:
        size = sum(map(len, pair[1].chunks))
        if not parts or len(parts[-1]) >= MAX_EMIT_JOBS or num_bytes + size > MAX_EMIT_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(pair)
        num_bytes += size
    return parts
