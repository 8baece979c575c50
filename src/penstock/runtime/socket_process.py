"""Processes that run one of our modules and talk with their parent on a socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

_EXIT_S = 2.0


def start_process(module: str, child_end: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `python -m module FD`, FD being its end of a socket pair. Raises OSError."""
    # The child must find the same modules, and must not import from the current folder.
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(child_end.fileno())],
        env={**environment, **path},
        pass_fds=[child_end.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process whose socket was closed. Kill it after two seconds."""
    try:
        process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
