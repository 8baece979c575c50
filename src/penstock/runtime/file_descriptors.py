"""Tells that a process has too few free file descriptors: once when they run out, and once when they are free again.

uvloop resets new connections while no descriptor is free, and says nothing. asyncio's own loop logs each refusal with a
traceback. A connection to Redis fails like one to a Redis that is away. So a watch looks for itself, and sees those
refusals too.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from typing import Any

_LOG = logging.getLogger(__package__)

LOOK_S = 1.0
RECOVERED_AFTER_S = 5.0
"""Seconds with free descriptors after which a shortage has ended. Otherwise each caller that leaves would end one."""
FREE_DESCRIPTORS = 8
"""So many must be free."""
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE})


def shortage_of(error: BaseException | None) -> str | None:
    """Return which limit of open files an error of the system means, and the remedy; None if it means none."""
    if not isinstance(error, OSError) or error.errno not in _SHORTAGES:
        return None
    if error.errno == errno.ENFILE:
        return "the machine has as many open files as it may (sysctl fs.file-max); raise that limit"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"this process may have {limit} open files, and has them; raise the limit "
        "(ulimit -n, LimitNOFILE= of systemd, ulimits of Docker), or allow fewer connections"
    )


class DescriptorWatch:
    """Logs when too few descriptors are free, and when some are again. Its process is that of the running loop."""

    def __init__(self, *, look_s: float = LOOK_S, recovered_after_s: float = RECOVERED_AFTER_S) -> None:
        self._look_s = look_s
        self._recovered_after_s = recovered_after_s
        self._timer: asyncio.TimerHandle | None = None
        self._short_s: float | None = None
        """When descriptors were last seen to lack; None if no shortage lasts."""

    def start(self) -> None:
        """Start to watch."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._handle)
        self._look()

    def stop(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._loop.set_exception_handler(None)

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Note a connection that asyncio could not accept. Other errors are logged as without this watch."""
        if (why := shortage_of(context.get("exception"))) is None:
            loop.default_exception_handler(context)
        else:
            self._note(why)

    def _look(self) -> None:
        why = _shortage()
        now_s = self._loop.time()
        if why is not None:
            self._note(why)
        elif self._short_s is not None and now_s - self._short_s >= self._recovered_after_s:
            self._short_s = None
            _LOG.warning("file descriptors are free again")
        self._timer = self._loop.call_later(self._look_s, self._look)

    def _note(self, why: str) -> None:
        if self._short_s is None:
            _LOG.error("too few file descriptors are free", extra={"reason": why})
        self._short_s = self._loop.time()


def _shortage() -> str | None:
    """Return why FREE_DESCRIPTORS files cannot be opened at once; None if they can."""
    opened: list[int] = []
    try:
        while len(opened) < FREE_DESCRIPTORS:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return shortage_of(error)
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return None
