"""Ends a process whose event loop stands still. A process of its own watches, since a hung call may hold Python's lock.

    python -I -S stall_guard.py PID THREAD_ID FD STALL_S

The watched loop counts up in shared memory. The watcher looks every second. A second counts as stalled only if the
watcher itself was scheduled, and the loop's thread used CPU time or sat in a call. So neither a suspended or paused
machine, nor SIGSTOP, a debugger or a lack of CPU time ends a process. SIGABRT ends it, and faulthandler then writes the
stacks of all threads to stderr. The watcher ends with the process. It uses the standard library only, and imports no
more of it than it needs: what only the watched process needs is imported there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    import subprocess

TICK_S = 1.0
_KILL_AFTER_S = 5.0
_EXIT_S = 2.0
_COUNT_BYTES = 8
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12  # Fields of /proc/PID/stat after the name.


class StallGuard:
    """Guards the loop on which it is started. Where there is no /proc, it does nothing."""

    def __init__(self, stall_s: float) -> None:
        """`stall_s`: seconds without a turn of the loop after which the process ends; 0: never."""
        self._stall_s = stall_s
        self._watcher: subprocess.Popen[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_turns = 0

    def start(self) -> None:
        """Start to watch the running loop and this thread. Raises OSError if no process can be started."""
        import asyncio
        import faulthandler
        import subprocess
        import threading

        if not self._stall_s or not os.path.exists("/proc/self/stat"):
            return
        self._loop = asyncio.get_running_loop()
        fd = os.memfd_create("penstock-turns")
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            self._page = mmap.mmap(fd, mmap.PAGESIZE)
            faulthandler.enable()
            ids = [str(os.getpid()), str(threading.get_native_id()), str(fd), str(self._stall_s)]
            self._watcher = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(__file__), *ids],
                pass_fds=[fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # A terminal's Ctrl-C is for the watched process.
            )
        finally:
            os.close(fd)
        self._turn()

    def stop(self) -> None:
        """Stop watching."""
        from subprocess import TimeoutExpired

        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is None:
            return
        if self._watcher.stdin is not None:
            self._watcher.stdin.close()
        try:
            self._watcher.wait(_EXIT_S)
        except TimeoutExpired:
            self._watcher.kill()
            self._watcher.wait()
        self._page.close()
        self._watcher = None

    def _turn(self) -> None:
        self._num_turns += 1
        self._page[:_COUNT_BYTES] = self._num_turns.to_bytes(_COUNT_BYTES, "little")
        self._timer = self._loop.call_later(min(TICK_S, self._stall_s / 4), self._turn)


def _state_of(pid: int, thread_id: int) -> tuple[str, int]:
    """Return the thread's state, as in /proc, and its CPU time in clock ticks. Raises OSError if it has ended."""
    with open(f"/proc/{pid}/task/{thread_id}/stat", encoding="utf-8", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return fields[_STATE], int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])


def _watch(pid: int, thread_id: int, page: mmap.mmap, stall_s: float) -> bool:
    """Return True once the loop has stood still for too long, False when the process ends or stops the guard."""
    tick_s = min(TICK_S, stall_s / 4)
    stalled_s, last_turn, last_cpu, last_s = 0.0, b"", 0, time.monotonic()
    while True:
        readable, _, _ = select.select([0], [], [], tick_s)
        if readable or os.getppid() != pid:
            return False
        now_s, turn = time.monotonic(), page[:_COUNT_BYTES]
        state, cpu = _state_of(pid, thread_id)
        is_held = state in "SD" or (state == "R" and cpu > last_cpu)
        if turn != last_turn:
            stalled_s = 0.0
        elif is_held:
            stalled_s += min(now_s - last_s, 2 * tick_s)
        last_turn, last_cpu, last_s = turn, cpu, now_s
        if stalled_s >= stall_s:
            return True


def _main(pid: int, thread_id: int, fd: int, stall_s: float) -> None:
    with mmap.mmap(fd, mmap.PAGESIZE) as page, contextlib.suppress(OSError):
        if not _watch(pid, thread_id, page, stall_s):
            return
        sys.stderr.write(f"penstock: the event loop stands still for {stall_s:g} s; the process is ended\n")
        sys.stderr.flush()
        os.kill(pid, signal.SIGABRT)
        if not select.select([0], [], [], _KILL_AFTER_S)[0] and os.getppid() == pid:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
