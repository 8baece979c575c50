"""When the tokens of running jobs leave: those of all streams together, the less often the more streams there are.

Each departure costs time that the engine could use: the node, Redis and whoever reads wake up, on cold caches where the
engine computes on the same cores. So a node sends about MAX_CHUNKS_PER_S however many streams it has, within the times
that a token may wait at least and at most. First tokens and ends, for which somebody waits, leave at once, unless so
many have left just before that they would again wake everybody all the time.
"""

from __future__ import annotations

import math

MAX_CHUNKS_PER_S = 200
MIN_INTERVAL_S = 0.02
"""Faster than a screen shows them."""
MAX_SHARE_S = 0.01
"""So much time a departure takes up, hurried or not: 100 hurried ones a second at most, and more where streams are few,
as there is little then that they could hold up."""
MAX_STREAMS_PER_S = 800
MAX_AHEAD_S = 0.07
"""So much may be taken up before what is hurried waits: by eight departures, or more where streams are few."""


class Pace:
    """Times of departures on a monotonic clock, in seconds.

    What is hurried leaves by the generic cell rate algorithm (ITU-T I.371): each departure takes up its share of time,
    behind those before it, and a hurried one is too early while more than MAX_AHEAD_S is taken up.
    """

    def __init__(self, max_interval_s: float) -> None:
        """No token waits longer than `max_interval_s`."""
        self._max_interval_s = max_interval_s
        self._all_left_s = self._taken_up_s = -math.inf
        self._num_streams = 0

    def until_next_s(self, num_owed: int, now_s: float, *, hurried: bool = False) -> float:
        """How long the tokens of so many streams wait until all leave together, at most 0: not any more; `hurried`: how
        long those wait that somebody waits for.

        As long as few are owed any yet, the streams of the last departure count: they go on.
        """
        num_streams = max(num_owed, self._num_streams)
        interval_s = min(self._max_interval_s, max(MIN_INTERVAL_S, num_streams / MAX_CHUNKS_PER_S))
        due_s = self._all_left_s + interval_s
        if hurried:
            due_s = min(due_s, self._taken_up_s - MAX_AHEAD_S)
        return due_s - now_s

    def note(self, now_s: float, *, num_streams: int | None) -> None:
        """All that was owed leaves now, to so many streams; None: only what somebody waits for."""
        if num_streams is not None:
            self._all_left_s = now_s
            self._num_streams = num_streams
        share_s = min(MAX_SHARE_S, self._num_streams / MAX_STREAMS_PER_S)
        self._taken_up_s = min(max(self._taken_up_s, now_s), now_s + MAX_AHEAD_S) + share_s
