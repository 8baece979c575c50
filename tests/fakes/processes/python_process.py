"""`python <words>` as a process of its own: a fork of the server of services, which has imported what commands need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from fakes.processes.child_process import ChildProcess
from fakes.processes.forked_process import ExitStatus

Stream = int | IO[Any] | None
TIMEOUT_S = 60.0


class PythonProcess(subprocess.Popen[str]):
    """`python <words>` with streams of text; `words`: a file, `-m` and a module, or `-c` and a program.

    `imports`: what the program imports beyond what all services import; the server imports it once. `new_group`: it is
    the first of a process group. `on_terminal`: its stdin is a terminal, which it controls. A test of what an
    interpreter does at its start must start an interpreter.
    """

    def __init__(
        self,
        *words: str,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        stdin: Stream = None,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.PIPE,
        cwd: Path | None = None,
        new_group: bool = False,
        on_terminal: bool = False,
    ) -> None:
        self._request = {
            "command": words,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "imports": imports,
            "new_group": new_group,
            "on_terminal": on_terminal,
        }
        streams: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        super().__init__([sys.executable, *words], env=env, text=True, **streams)

    # Popen waits for children of this process. A fork is a child of its server, which has its exit status.

    def _execute_child(self, *arguments: Any) -> None:
        pipes, close_child_ends = arguments[10:16], getattr(self, "_close_pipe_fds")  # noqa: B009  typeshed has it not
        read, _, _, written, _, errors = pipes
        streams = [own if given == -1 else given for own, given in enumerate((read, written, errors))]
        try:
            self.pid, status = ChildProcess.session_server().fork(self._request, streams)
        finally:
            close_child_ends(*pipes)
        self._exit_status = ExitStatus(status)
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._wait(0, or_raise=False)

    def _wait(self, timeout: float | None, *, or_raise: bool = True) -> int | None:
        if self.returncode is None:
            ended = self._exit_status.within(timeout)
            if ended is not None:
                self.returncode = ended
            elif or_raise:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode


def run_python(
    *words: str, env: Mapping[str, str] | None = None, imports: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `python <words>` to its end. What it writes is in the answer."""
    with PythonProcess(*words, env=env, imports=imports) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
