"""The stacks of a running process for `penstock support-bundle`, also of one whose event loop or lock stands still.

A process that offers its stacks has an anonymous file in memory. At SIGUSR2 faulthandler writes the stacks of all
threads into it, without Python's lock. Only processes of the same user can read it, as /proc/PID/fd/NUMBER, and nothing
is left on a disk. A process without that file is never sent the signal, which would end it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_NAME = "penstock-stacks"
_SIGNAL = signal.SIGUSR2
_WRITE_S = 1.0
_QUIET_S = 0.1
"""Seconds without growth after which a dump counts as complete."""
_MAX_BYTES = 1 << 20
_PROCESSES = Path("/proc")


def offer_stacks() -> None:
    """Let `stacks_of` read the stacks of this process. Where the system has no such files, do nothing."""
    if not hasattr(os, "memfd_create"):
        return
    with suppress(OSError):
        # Stays open until the process ends. faulthandler keeps the number of the descriptor only.
        faulthandler.register(_SIGNAL, os.memfd_create(_NAME), all_threads=True)


def offering_processes() -> Iterator[int]:
    """Yield the ids of this user's processes that offer their stacks."""
    for folder in _PROCESSES.iterdir():
        if folder.name.isdecimal() and _file_of(int(folder.name)) is not None:
            yield int(folder.name)


def stacks_of(pid: int) -> str:
    """Return the stacks of a process that offers them. Raises OSError if it has ended."""
    path = _file_of(pid)
    if path is None:
        raise ProcessLookupError(f"process {pid} offers no stacks")
    before = path.stat().st_size
    os.kill(pid, _SIGNAL)
    until_s, size, grown_s = time.monotonic() + _WRITE_S, before, time.monotonic()
    while time.monotonic() < until_s and (size == before or time.monotonic() - grown_s < _QUIET_S):
        time.sleep(_QUIET_S / 10)
        if (now := path.stat().st_size) != size:
            size, grown_s = now, time.monotonic()
    with path.open("rb") as file:
        file.seek(before)
        return file.read(_MAX_BYTES).decode(errors="replace")


def _file_of(pid: int) -> Path | None:
    """Return the path of a process's file; None if it has none, or belongs to another user."""
    with suppress(OSError):
        for path in (_PROCESSES / str(pid) / "fd").iterdir():
            with suppress(OSError):
                if f"memfd:{_NAME}" in os.readlink(path):
                    return path
    return None
