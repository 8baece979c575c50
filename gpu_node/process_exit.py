"""The exit of a node's process while threads still compute.

Python frees memory at its exit, but a thread inside a library may go on writing to it. The process then died with
status 139 (SIGSEGV). So if a thread does not end, the process ends without Python's cleanup.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.contract.errors import PenstockError

THREAD_PATIENCE_S = 1.0
"""How long a running step may take to finish."""


@contextmanager
def exiting_despite_threads(exit_code_of: Callable[[PenstockError], int]) -> Iterator[None]:
    """End the process after the block, without cleanup, if a thread that the block started is still running.

    If all threads have ended, the block ends normally. `exit_code_of`: exit status of an error reported in one line.
    """
    before = set(threading.enumerate())
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        # After an error, idle pool threads cannot be told from hung ones, so any living thread counts.
        if _are_running(set(threading.enumerate()) - before, daemons_only=error is None):
            _end(_report(error, exit_code_of))


def _are_running(threads: set[threading.Thread], *, daemons_only: bool) -> bool:
    deadline_s = time.monotonic() + THREAD_PATIENCE_S
    for thread in threads:
        if thread.daemon:
            thread.join(max(0.0, deadline_s - time.monotonic()))
    return any(thread.is_alive() for thread in threads if thread.daemon or not daemons_only)


def _report(error: BaseException | None, exit_code_of: Callable[[PenstockError], int]) -> int:
    """Report an error as the command line would, and return the exit status."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, PenstockError):
        sys.stderr.write(f"penstock: {error.message}\n")
        return exit_code_of(error)
    traceback.print_exception(error)
    return 1


def _end(status: int) -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
