"""A guard process that runs one command and ends it when the owning process ends. The owner holds a pipe to it.

    python -I -S process_guard.py GRACE_S FOLDER CPUS DESCRIPTORS COMMAND...

The guard ends the command when the pipe closes, the owner dies, or the guard receives SIGTERM. It sends SIGTERM, waits
GRACE_S seconds, sends SIGKILL to the command's process group, removes FOLDER unless that is the empty string, and exits
with the command's status. If it receives SIGINT while it waits, it sends a second SIGTERM, by which a node ends at
once; no system sends SIGINT to all processes of a service. The command stays on CPUS, such as 0,2, unless that is the
empty string, and inherits DESCRIPTORS, numbers with commas between them. The guard uses the standard library only,
because it must start fast and not depend on the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

_PR_SET_PDEATHSIG = 1
_OWNER_CHECK_S = 1.0
_REAP_POLL_S = 0.02


def guarded(
    command: list[str], *, grace_s: float, folder: str = "", cpus: Iterable[int] = (), descriptors: Iterable[int] = ()
) -> list[str]:
    """Return the command line that runs `command` under a guard. Start it with a pipe as stdin, in a new session.

    descriptors: those that the command inherits, under the same numbers. Pass them to the guard too.
    """
    guard = [sys.executable, "-I", "-S", os.path.abspath(__file__)]
    lists = (",".join(map(str, numbers)) for numbers in (cpus, descriptors))
    return [*guard, str(grace_s), folder, *lists, *command]


def _stay_on(cpus: str) -> None:
    """Keep this process, and so its command, on these CPUs, as far as the system still allows it."""
    try:
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    except OSError as error:
        sys.stderr.write(f"penstock: cannot stay on the CPUs {cpus}: {error}\n")


def _die_with_guard() -> Callable[[], None] | None:
    """Return a function to call in the child between fork and exec, so that the kernel kills it with the guard.

    The kernel ties this to the thread that forked. The guard has only one thread.
    """
    if sys.platform != "linux":
        return None
    prctl, guard = ctypes.CDLL(None).prctl, os.getpid()

    def set_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(1)

    return set_signal


def _wait_for_end(child: subprocess.Popen[bytes], wake: int) -> None:
    """Wait until the child has ended, the owner has died, the pipe has closed, or SIGTERM has arrived."""
    owner = os.getppid()
    while child.poll() is None and os.getppid() == owner:
        # A fork of the owner may keep the pipe open after the owner's death, so the owner is polled too.
        readable, _, _ = select.select([0, wake], [], [], _OWNER_CHECK_S)
        if 0 in readable and not os.read(0, 4096):
            return
        if wake in readable and signal.SIGTERM in os.read(wake, 4096):
            return


def _end(child: subprocess.Popen[bytes], grace_s: float, wake: int) -> int:
    if child.poll() is None:
        child.terminate()
    deadline = time.monotonic() + grace_s
    while child.poll() is None and time.monotonic() < deadline:
        readable, _, _ = select.select([wake], [], [], _REAP_POLL_S)
        if wake in readable and signal.SIGINT in os.read(wake, 4096) and child.poll() is None:
            child.terminate()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


def _main(grace_s: float, folder: str, cpus: str, descriptors: str, command: list[str]) -> int:
    if cpus:
        _stay_on(cpus)
    wake, wake_in = os.pipe()
    os.set_blocking(wake_in, False)
    signal.set_wakeup_fd(wake_in)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with_guard(),  # noqa: PLW1509  the guard has one thread
            pass_fds=[int(number) for number in descriptors.split(",") if number],
            process_group=0,
        )
        _wait_for_end(child, wake)
        status = _end(child, grace_s, wake)
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(_main(float(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:]))
