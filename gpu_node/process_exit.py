"""The end of a node's process while threads still compute.

Python frees memory when it ends, but a step in a library goes on writing to it: the process died with status 139. So
where a thread does not end, the process ends without that.
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
"""A step that is nearly done may end."""


@contextmanager
def leaving_whatever_computes(exit_code_of: Callable[[PenstockError], int]) -> Iterator[None]:
    """Ends the process behind the block if a thread that began in it goes on; otherwise the block ends as it does.

    `exit_code_of` gives the exit status of an error that is told in one line.
    """
    before = set(threading.enumerate())
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        # After an error a pool's idle threads are not told from those that hang.
        if _go_on(set(threading.enumerate()) - before, daemons_only=error is None):
            _end(_say(error, exit_code_of))


def _go_on(threads: set[threading.Thread], *, daemons_only: bool) -> bool:
    deadline_s = time.monotonic() + THREAD_PATIENCE_S
    for thread in threads:
        if thread.daemon:
            thread.join(max(0.0, deadline_s - time.monotonic()))
    return any(thread.is_alive() for thread in threads if thread.daemon or not daemons_only)


def _say(error: BaseException | None, exit_code_of: Callable[[PenstockError], int]) -> int:
    """Writes what the command would write of an error; its exit status."""
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
