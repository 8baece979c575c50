"""The first process of a container: it reaps orphans, and passes signals on to the command.

The kernel gives every orphan to process 1, and keeps it as a zombie until that process waits for it. A command cannot
do this itself: its libraries wait for their own children. So the command runs in a child. Only the standard library is
imported, because this process stays for as long as the command.
"""

from __future__ import annotations

import os
import signal
import sys
import time

_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_WATCHED = {signal.SIGCHLD, *_PASSED_ON}
_LAST_PROCESSES_S = 15.0
"""Seconds that other processes get after the command has ended. The guard of a Redis gives it 10 s."""


def reap_orphans_if_first() -> None:
    """In process 1, fork, and return in the child alone. Elsewhere, return at once.

    Process 1 exits with the child's status; after a signal, with 128 plus its number, as shells do.
    """
    if os.getpid() != 1 or sys.platform != "linux":
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    status = None
    while status is None:
        info = signal.sigwaitinfo(_WATCHED)
        if info.si_signo == signal.SIGCHLD:
            status = _reap(child)
        elif info.si_code <= 0:
            # Sent by a process. The terminal sends its signals to the child too.
            os.kill(child, info.si_signo)
    _await_last_processes()
    # Not sys.exit: nothing of this process is to be flushed or closed.
    os._exit(status if status >= 0 else 128 - status)


def _reap(child: int) -> int | None:
    """Wait for every process that has ended. Return the exit status of `child` if it is one of them."""
    found = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        pass
    return found


def _await_last_processes() -> None:
    """Wait until no process is left. The kernel would kill those that are left when process 1 exits."""
    until_s = time.monotonic() + _LAST_PROCESSES_S
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                signal.sigtimedwait({signal.SIGCHLD}, left_s)
        except ChildProcessError:
            return
