"""Commands of the fork server are processes like any other: streams, environment, signals, exit status."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.processes.child_process import ChildProcess
from fakes.processes.forked_process import ForkedProcess, ForkServer


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


def start(server: ForkServer, folder: Path, code: str, **env: str) -> tuple[ForkedProcess, Path]:
    """A program in a file of its own, and where its stderr goes."""
    program, log = folder / "program.py", folder / "log"
    program.write_text(code)
    with log.open("wb") as said:
        return server.start([str(program), "first", "second"], os.environ | env, said.fileno()), log


def test_a_command_has_its_own_words_environment_and_streams(server: ForkServer, tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['HERE'], os.getpid()); print('oh', file=sys.stderr); exit(7)"
    process, log = start(server, tmp_path, code, HERE="there")
    assert process.stdout.read().decode() == f"['first', 'second'] there {process.pid}\n"
    assert process.wait(20) == process.poll() == process.returncode == 7
    assert log.read_text() == "oh\n"
    process.stdout.close()


def test_an_exception_ends_a_command_with_a_traceback(server: ForkServer, tmp_path: Path) -> None:
    process, log = start(server, tmp_path, "raise ValueError('wrong')")
    assert process.wait(20) == 1
    assert log.read_text().endswith("ValueError: wrong\n")
    process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_signals_reach_the_command(server: ForkServer, tmp_path: Path, number: signal.Signals) -> None:
    process, _ = start(server, tmp_path, "import time; print('up', flush=True); time.sleep(60)")
    assert process.stdout.readline() == b"up\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(number)
    assert process.wait(20) == -number
    process.stdout.close()


def test_a_command_ends_with_its_server(tmp_path: Path) -> None:
    server = ForkServer()
    process, _ = start(server, tmp_path, "import time; print('up', flush=True); time.sleep(60)")
    assert process.stdout.readline() == b"up\n"
    server.close()
    assert process.stdout.read() == b""
    assert process.wait(20) == -signal.SIGKILL
    process.stdout.close()


def test_this_session_starts_services_so() -> None:
    process = ChildProcess(["penstock", "--version"], {})
    assert process.wait() == 0
    assert isinstance(process._process, ForkedProcess)
    process.close()
