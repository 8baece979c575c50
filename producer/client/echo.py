"""Echoes: messages that a process publishes to its own inbox. No I/O here; `ClientInbox` sends and receives them."""

from __future__ import annotations

import asyncio

_MARK = b"\xc0"
"""msgpack's nil, with which no chunk begins. The echo's number follows it."""
_INTERVALS_MISSED = 1.5


class Echoes:
    """Tracks which echoes were sent and which returned.

    A missing echo means that the subscription is dead. A returned echo proves that everything published before it has
    arrived.
    """

    def __init__(self, interval_s: float) -> None:
        self._overdue_after_s = _INTERVALS_MISSED * interval_s
        self._num_sent = self._last_heard = 0
        self._unheard_since_s: float | None = None
        self._bell = asyncio.Event()

    @staticmethod
    def is_echo(message: bytes) -> bool:
        """Whether a message is an echo."""
        return message.startswith(_MARK)

    def next(self, now_s: float) -> bytes:
        """Return the echo to publish now."""
        self._num_sent += 1
        if self._unheard_since_s is None:
            self._unheard_since_s = now_s
        return _MARK + str(self._num_sent).encode()

    def note_returned(self, message: bytes) -> None:
        """Record an echo that returned. Raises ValueError for a number that was never sent."""
        number = int(message[len(_MARK) :])
        if not 0 < number <= self._num_sent:
            raise ValueError(f"echo {number} was never sent: the last one is {self._num_sent}")
        self._last_heard = max(self._last_heard, number)
        self._unheard_since_s = None
        self._bell.set()

    def restart(self) -> None:
        """Forget the echoes of the old subscription: they will not return to the new one."""
        self._unheard_since_s = None

    def is_overdue(self, now_s: float) -> bool:
        """Whether an echo has been missing for 1.5 intervals."""
        return self._unheard_since_s is not None and now_s - self._unheard_since_s > self._overdue_after_s

    async def until_all_returned(self) -> None:
        """Wait until every echo sent before the call has returned."""
        last_sent = self._num_sent
        while self._last_heard < last_sent:
            self._bell.clear()
            await self._bell.wait()
