"""Run a function in a fork that may add only so much memory and CPU time, and learn what it raises or that it died."""

from __future__ import annotations

import os
import resource
import signal
import warnings
from collections.abc import Callable


def said_within(mib: int, work: Callable[[], object], *, cpu_s: int = 20) -> str:
    """Return the type and message of what `work` raises in a fork with `mib` more memory, or the text of its result.

    A fork that the kernel or an allocator ends gives `died`.
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            _limit(mib, cpu_s)
            try:
                answer = str(work())
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(write_end, answer.encode(errors="replace")[:60_000])
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answers:
        answer = answers.read().decode()
    os.waitpid(pid, 0)
    return answer or "died"


def _limit(mib: int, cpu_s: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        limit = int(statm.read().split()[0]) * resource.getpagesize() + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGABRT, signal.SIG_DFL)  # Without the dump of pytest's faulthandler.
