"""Echoes: messages that a process sends to its own inbox. Pure bookkeeping; the inbox publishes and reads."""

from __future__ import annotations

import asyncio

_MARK = b"\xc0"
"""msgpack's nil, which no chunk looks like; the echo's number follows it."""
_INTERVALS_MISSED = 1.5


class Echoes:
    """What was sent and what came back. An echo that stays away tells of a dead subscription; one that comes back
    proves that all that was published before it has come too.
    """

    def __init__(self, interval_s: float) -> None:
        self._overdue_after_s = _INTERVALS_MISSED * interval_s
        self._num_sent = self._last_heard = 0
        self._unheard_since_s: float | None = None
        self._bell = asyncio.Event()

    @staticmethod
    def is_echo(message: bytes) -> bool:
        """Whether a message is one of ours."""
        return message.startswith(_MARK)

    def next(self, now_s: float) -> bytes:
        """The echo to publish now."""
        self._num_sent += 1
        if self._unheard_since_s is None:
            self._unheard_since_s = now_s
        return _MARK + str(self._num_sent).encode()

    def hear(self, message: bytes) -> None:
        """Takes in an echo that came back; raises ValueError for one that we cannot have sent."""
        number = int(message[len(_MARK) :])
        if not 0 < number <= self._num_sent:
            raise ValueError(f"echo {number} of {self._num_sent}")
        self._last_heard = max(self._last_heard, number)
        self._unheard_since_s = None
        self._bell.set()

    def restart(self) -> None:
        """A new subscription: what was sent before it will not come."""
        self._unheard_since_s = None

    def is_overdue(self, now_s: float) -> bool:
        """Whether an echo has stayed away for too long."""
        return self._unheard_since_s is not None and now_s - self._unheard_since_s > self._overdue_after_s

    async def until_all_heard(self) -> None:
        """Until all that was sent before the call has come back."""
        last_sent = self._num_sent
        while self._last_heard < last_sent:
            self._bell.clear()
            await self._bell.wait()
