"""Commands that a fork server runs in processes of their own; used as `subprocess.Popen` is."""

from __future__ import annotations

import array
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

SERVER = str(Path(__file__).parent / "fork_server.py")


class ForkServer:
    """A server process. It ends with the process that opened it, and all its children with it.

    `words`: its arguments. `address`: that of a server which another process has opened.
    """

    def __init__(self, *words: str, address: str = "") -> None:
        self.address = address
        self._words = words
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def open(self) -> None:
        """Start the server without waiting for it, which takes a second or more. Otherwise the first command does."""
        with self._lock:
            self._connection()

    def start(
        self, command: Sequence[str], env: Mapping[str, str], log: int, imports: Sequence[str] = ()
    ) -> ForkedProcess:
        """Run `python <command>`; `log`: a descriptor for stderr. `imports`: what the server is to have imported."""
        (stdout, said) = os.pipe()
        try:
            pid, status = self.fork(
                {"command": command, "env": dict(env), "cwd": os.getcwd(), "imports": imports}, [0, said, log]
            )
        except BaseException:
            os.close(stdout)
            raise
        finally:
            os.close(said)
        return ForkedProcess(pid, os.fdopen(stdout, "rb"), status)

    def close(self) -> None:
        """End the server, if this process has opened it."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.wait()
            shutil.rmtree(Path(self.address).parent)

    def fork(self, request: Mapping[str, object], streams: Sequence[int]) -> tuple[int, int]:
        """Have the server fork. Return the child's id and a pipe that gets its exit status."""
        status, ended = os.pipe()
        try:
            with self._lock:
                control = self._connection()
                socket.send_fds(control, [json.dumps(request).encode()], [*streams, ended])
                answer = control.recv(64)
        finally:
            os.close(ended)
        assert answer, "the fork server has died"
        return int(answer), status

    def _connection(self) -> socket.socket:
        if self._control is None:
            self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if not self.address:
                self._start()
            self._control.connect(self.address)
        return self._control

    def _start(self) -> None:
        self.address = f"{tempfile.mkdtemp(prefix='forks-')}/socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.address)
            listener.listen()
            words = [sys.executable, SERVER, str(listener.fileno()), *self._words]
            self._process = subprocess.Popen(words, pass_fds=[listener.fileno()], stdout=subprocess.DEVNULL)


class ExitStatus:
    """What the fork server writes to a pipe when a child has ended."""

    def __init__(self, pipe: int) -> None:
        self._pipe: int | None = pipe
        self._status: int | None = None

    def within(self, timeout_s: float | None) -> int | None:
        """Return the exit status, negative for a signal; None if the child runs longer than that."""
        if self._pipe is not None and _is_readable(self._pipe, timeout_s):
            status = array.array("i", os.read(self._pipe, 64))
            self._status = status[0] if status else -signal.SIGKILL  # The server ended, and its children with it.
            os.close(self._pipe)
            self._pipe = None
        return self._status


class ForkedProcess:
    """A child of the fork server."""

    def __init__(self, pid: int, stdout: IO[bytes], status: int) -> None:
        self.pid = pid
        self.stdout = stdout
        self._status = ExitStatus(status)

    @property
    def returncode(self) -> int | None:
        """The exit status, None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._status.within(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once there is one. Raises TimeoutExpired."""
        status = self._status.within(timeout)
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


def _is_readable(fd: int, timeout_s: float | None) -> bool:
    """Wait for data or the end of a pipe. Descriptors may be too many for `select`."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
