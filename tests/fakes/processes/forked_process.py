"""Commands that a fork server runs in processes of their own; used as `subprocess.Popen` is."""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

SERVER = str(Path(__file__).parent / "fork_server.py")


class ForkServer:
    """The server process. It ends with this process, and all its children with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control, self._far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def open(self) -> None:
        """Start the server without waiting for it, which takes a second or two. Otherwise the first command does."""
        with self._lock:
            if self._process is None:
                fd = self._far_end.fileno()
                self._process = subprocess.Popen([sys.executable, SERVER, str(fd)], pass_fds=[fd])
                self._far_end.close()

    def start(self, command: Sequence[str], env: Mapping[str, str], log: int) -> ForkedProcess:
        """Run `python <command>`; `log`: a descriptor for stderr."""
        request = json.dumps({"command": command, "env": dict(env), "cwd": os.getcwd()}).encode()
        (stdout, said), (status, ended) = os.pipe(), os.pipe()
        self.open()
        try:
            with self._lock:
                socket.send_fds(self._control, [request], [said, log, ended])
                answer = self._control.recv(64)
        finally:
            os.close(said)
            os.close(ended)
        assert answer, "the fork server has died"
        return ForkedProcess(int(answer), os.fdopen(stdout, "rb"), status)

    def close(self) -> None:
        """End the server."""
        self._far_end.close()
        self._control.close()
        if self._process is not None:
            self._process.wait()


class ForkedProcess:
    """A child of the fork server."""

    def __init__(self, pid: int, stdout: IO[bytes], status: int) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._status: int | None = status

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once there is one. Raises TimeoutExpired."""
        status = self._ended_within(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def _ended_within(self, timeout_s: float | None) -> int | None:
        if self._status is not None and _is_readable(self._status, timeout_s):
            status = array.array("i", os.read(self._status, 64))
            self.returncode = status[0] if status else -signal.SIGKILL  # The server ended, and its children with it.
            os.close(self._status)
            self._status = None
        return self.returncode


def _is_readable(fd: int, timeout_s: float | None) -> bool:
    """Wait for data or the end of a pipe. Descriptors may be too many for `select`."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
