"""A bound on how long unsent bytes wait for a client that has stopped reading."""

from __future__ import annotations

import asyncio
import socket
import struct

TAKE_TIMEOUT_S = 60.0
"""Seconds after which a connection is closed if its client reads none of the bytes that wait for it."""
MAX_LATE_S = 1.0
"""If the check itself runs later than this many seconds, the process was too busy, and the client may be fine."""
_NO_LINGER = struct.pack("ii", 1, 0)
"""Value of SO_LINGER that resets the connection and discards its unsent bytes."""


class ReaderWatch:
    """Resets a connection whose client reads nothing for TAKE_TIMEOUT_S while bytes wait for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        """Event-loop time at which the timer should fire."""

    def start(self) -> None:
        """Begin to check, unless the checks run already. They end once no byte waits."""
        if self._timer is None:
            self._check()

    def stop(self) -> None:
        """End the checks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, num_before: int = 0) -> None:
        """Abort the connection if the client has read nothing since the last check; otherwise check again later.

        `num_before` is the number of unsent bytes at the last check. The check also covers a closed transport, which
        still waits for its client to read the last byte.
        """
        num_waiting = self._transport.get_write_buffer_size()
        # If this process was busy or had no core, it has not written bytes that the client would have read.
        is_late = self._loop.time() - self._due_s > MAX_LATE_S
        if num_waiting and num_waiting == num_before and not is_late:
            # Otherwise the kernel would keep megabytes for a client that may never read them.
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.abort()
        elif num_waiting:
            self._due_s = self._loop.time() + TAKE_TIMEOUT_S
            self._timer = self._loop.call_at(self._due_s, self._check, num_waiting)
        else:
            self._timer = None
