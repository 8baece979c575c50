"""Child processes of tests: start, wait, pause, kill, and crash at a given point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fakes.processes.forked_process import ForkedProcess, ForkServer

ARMED = str(Path(__file__).parent / "armed.py")
_PRELOADED = os.environ.get("LD_PRELOAD")
"""Libraries that this process, and so the fork server and its forks, were loaded with."""


class ChildProcess:
    """`python <command>`, which reports events as JSON lines on stdout. `dies`: see armed.py."""

    wrapper: Sequence[str] = ()
    """A script that armed.py runs, and that runs the command itself; empty if armed.py runs the command."""
    imports: Sequence[str] = ()
    """What the command imports beyond what all services import; a fork server imports it once."""
    fork_server: ForkServer | None = None
    """Starts the commands of armed.py, where a test session has one; else each is a new interpreter. So is one that has
    other preloaded libraries than this process."""

    @classmethod
    def session_server(cls) -> ForkServer:
        """The fork server of this test session."""
        assert cls.fork_server is not None, "no session of tests runs"
        return cls.fork_server

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, dies: str = "") -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by __exit__
        self._process = self._start(command, os.environ | env | {"FAULT_AT": dies})

    def _start(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes] | ForkedProcess:
        command = [*self.wrapper, *command]
        # A fork has the libraries of its server: one with another clock, for example, needs a program of its own.
        if self.fork_server is not None and env.get("LD_PRELOAD") == _PRELOADED:
            return self.fork_server.start(command, env, self._log.fileno(), self.imports)
        words = [sys.executable, ARMED, *command]
        return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=self._log)

    def next_event(self) -> dict[str, Any] | None:
        """Return the next event, None after the last one."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def wait_event(self, name: str) -> dict[str, Any]:
        """Wait for the next event with that name. Return it."""
        while (event := self.next_event()) is not None:
            if event["event"] == name:
                return event
        raise AssertionError(f"the process ended with status {self.wait()} before it was {name}:\n{self.log}")

    def wait_ready(self) -> Self:
        """Wait until the process serves."""
        self.wait_event("ready")
        return self

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """Return the log so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for the process to end. Return its exit status."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def stop(self) -> int:
        """Send SIGTERM. Return the exit status after the drain."""
        self._process.terminate()
        return self.wait()

    def close(self) -> None:
        """Kill the process if it still runs."""
        self.kill()
        self._log.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self.wait_ready()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            print(f"process {self.pid}, status {self._process.poll()}:\n{self.log}", file=sys.stderr)
        self.close()
