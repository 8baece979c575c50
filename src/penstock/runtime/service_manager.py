"""Tells systemd how this process does, for units with `Type=notify` and `WatchdogSec=`.

The protocol is a datagram to the socket that NOTIFY_SOCKET names (sd_notify(3), sd_watchdog_enabled(3)). Without that
variable, as outside of systemd, nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Self

_LOG = logging.getLogger(__package__)
_FEEDS_PER_TIMEOUT = 3
"""systemd recommends two; a third keeps one late turn of the loop from counting."""


class ServiceManager:
    """The service manager that started this process, if one did."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        """`watchdog_s`: seconds without `WATCHDOG=1` after which it ends this process; 0: never."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watchdog_s = watchdog_s

    @classmethod
    def of_environment(cls) -> Self:
        """Return the service manager that this process's variables name."""
        for_this_process = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        wanted_us = os.environ.get("WATCHDOG_USEC", "")
        watchdog_s = int(wanted_us) / 1e6 if for_this_process and wanted_us.isdecimal() else 0.0
        return cls(os.environ.get("NOTIFY_SOCKET", ""), watchdog_s)

    def ready(self, status: str) -> None:
        """Report that the process serves; `systemctl status` shows `status`."""
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        """Change what `systemctl status` shows."""
        self._send(f"STATUS={status}")

    def stopping(self) -> None:
        """Report that the process has begun to stop."""
        self._send("STOPPING=1\nSTATUS=draining")

    async def feed(self, advances: Callable[[], bool] = lambda: True) -> None:
        """Feed the watchdog until cancelled, from this event loop and only while `advances`. It may have none."""
        if not self._address or not self._watchdog_s:
            return
        while True:
            if advances():
                self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / _FEEDS_PER_TIMEOUT)

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
                # A full queue of systemd's must not hold the event loop.
                connection.setblocking(False)
                connection.sendto(text.encode(), self._address)
        except OSError as error:
            _LOG.warning("the service manager was not told", extra={"told": text.split("\n")[0], "reason": str(error)})
