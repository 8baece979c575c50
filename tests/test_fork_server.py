"""Commands of the fork server are processes like any other: streams, environment, signals, exit status."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.processes.child_process import ChildProcess
from fakes.processes.fork_client import command_of
from fakes.processes.forked_process import ForkedProcess, ForkServer
from fakes.processes.python_process import PythonProcess, run_python
from faults.tools.redis_process import faked_clock, find_libfaketime

from tests.conftest import HAS_GPU  # noqa: F401  the condition below reads it


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """The session's server of services, for a second client: a new server would import everything again."""
    session_server = ChildProcess.session_server()
    session_server.open()
    server = ForkServer(address=session_server.address)
    yield server
    server.close()


def start(server: ForkServer, folder: Path, code: str, **env: str) -> tuple[ForkedProcess, Path]:
    """A program in a file of its own, and where its stderr goes."""
    program, log = folder / "program.py", folder / "log"
    program.write_text(code)
    with log.open("wb") as said:
        return server.start([str(program), "first", "second"], os.environ | env, said.fileno()), log


def test_command_has_its_own_arguments_environment_and_streams(server: ForkServer, tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['HERE'], os.getpid()); print('oh', file=sys.stderr); exit(7)"
    process, log = start(server, tmp_path, code, HERE="there")
    assert process.stdout.read().decode() == f"['first', 'second'] there {process.pid}\n"
    assert process.wait(20) == process.poll() == process.returncode == 7
    assert log.read_text() == "oh\n"
    process.stdout.close()


@pytest.mark.skipif(find_libfaketime() is None, reason="libfaketime is not installed (Debian's libfaketime)")
def test_a_command_with_a_preloaded_library_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text("import json, time; print(json.dumps({'event': 'ready', 'at_s': time.time()}))")
    for ahead_s in (0, 7200):
        with monkeypatch.context() as patched:
            for name, value in faked_clock(ahead_s).items():
                patched.setenv(name, value)
            process = ChildProcess([str(program)], {})
        assert process.wait_event("ready")["at_s"] == pytest.approx(time.time() + ahead_s, abs=60)
        process.close()


def test_an_exception_ends_a_command_with_a_traceback(server: ForkServer, tmp_path: Path) -> None:
    process, log = start(server, tmp_path, "raise ValueError('wrong')")
    assert process.wait(20) == 1
    assert log.read_text().endswith("ValueError: wrong\n")
    process.stdout.close()


def test_a_command_ends_as_an_interpreter_does(server: ForkServer, tmp_path: Path) -> None:
    """Its threads and exit functions run, and what it has left open is told."""
    code = """
import atexit, sys, threading, time, warnings
warnings.simplefilter("error")
left_open = open(__file__)
atexit.register(print, "exit function")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
sys.exit("wrong")
"""
    process, log = start(server, tmp_path, code)
    assert process.stdout.read() == b"thread\nexit function\n"
    assert process.wait(20) == 1
    assert log.read_text().startswith("wrong\n") and "ResourceWarning: unclosed file" in log.read_text()
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
    server = ForkServer("services")
    process, _ = start(server, tmp_path, "import time; print('up', flush=True); time.sleep(60)")
    assert process.stdout.readline() == b"up\n"
    server.close()
    assert process.stdout.read() == b""
    assert process.wait(20) == -signal.SIGKILL
    process.stdout.close()


def test_commands_end_with_the_client_that_asked_for_them_and_the_server_goes_on(
    server: ForkServer, tmp_path: Path
) -> None:
    code = "import time; print('up', flush=True); time.sleep(60)"
    kept, _ = start(server, tmp_path, code)
    client = ForkServer(address=server.address)
    left, _ = start(client, tmp_path, code)
    assert kept.stdout.readline() == left.stdout.readline() == b"up\n"
    client.close()
    assert left.wait(20) == -signal.SIGKILL
    assert kept.poll() is None
    kept.kill()
    for process in (kept, left):
        process.wait(20)
        process.stdout.close()


def in_worker(server: ForkServer, code: str) -> Any:
    """What a fork of a server of tests writes to stdout as JSON."""
    answer, said = os.pipe()
    _, status = server.fork({"command": [f"import json, sys; print(json.dumps({code}))"], "imports": []}, [0, said, 2])
    os.close(said)
    os.close(status)
    with open(answer) as lines:
        return json.load(lines)


def test_a_worker_has_the_tests_imported_but_none_that_failed(tmp_path: Path) -> None:
    whole, broken = tmp_path / "test_whole.py", tmp_path / "test_broken.py"
    whole.write_text("def test_it(): pass")
    broken.write_text("raise ValueError")
    for files, is_kept in (([whole], True), ([whole, broken], False)):
        server = ForkServer("tests", "-c", os.devnull, "--import-mode=importlib", *map(str, files))
        assert in_worker(server, "[name in sys.modules for name in ('test_whole', 'test_broken')]") == [is_kept, False]
        server.close()


@pytest.mark.skipif("'PYTEST_XDIST_WORKER' not in os.environ or HAS_GPU", reason="this process is no forked worker")
def test_this_worker_is_a_fork() -> None:
    assert "fork_server.py\0" in Path(f"/proc/{os.getppid()}/cmdline").read_text()


def test_a_server_has_imported_what_a_request_names(server: ForkServer, tmp_path: Path) -> None:
    code = "import sys; print('mailbox' in sys.modules)"
    program = tmp_path / "program.py"
    program.write_text(code)
    for imports, printed in ((), b"False\n"), (("mailbox",), b"True\n"):
        process = server.start([str(program)], os.environ, 2, imports)
        assert process.stdout.read() == printed
        process.stdout.close()
        process.wait(20)


def test_options_of_the_python_command_are_supported() -> None:
    done = run_python("-c", "import sys; print(sys.argv); sys.exit('wrong')", "word")
    assert (done.returncode, done.stdout, done.stderr) == (1, "['-c', 'word']\n", "wrong\n")
    done = run_python("-W", "error", "-c", "import warnings; warnings.warn('oh')")
    assert done.returncode == 1
    assert done.stderr.endswith("UserWarning: oh\n")
    assert run_python("-m", "penstock", "--version").stdout.startswith("penstock ")


@pytest.fixture
def part(server: ForkServer) -> Iterator[subprocess.Popen[str]]:
    """A stand-in for a part of `penstock serve`: it prints its process id, and ends with status 7 on SIGTERM."""
    server.open()
    code = (
        "import os, signal; signal.signal(15, lambda *_: os._exit(7)); print(os.getpid(), flush=True); signal.pause()"
    )
    command = command_of(server.address, "-c", code)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_part_of_a_forked_command_gets_its_signals_and_gives_its_status(part: subprocess.Popen[str]) -> None:
    assert part.stdout is not None
    assert int(part.stdout.readline()) != part.pid
    part.terminate()
    assert part.wait(20) == 7


@pytest.mark.parametrize("is_the_part_itself", [False, True])
def test_a_part_of_a_forked_command_is_killed_with_what_stands_for_it(
    part: subprocess.Popen[str], is_the_part_itself: bool
) -> None:
    assert part.stdout is not None
    pid = int(part.stdout.readline())
    watched = os.pidfd_open(pid)
    os.kill(pid if is_the_part_itself else part.pid, signal.SIGKILL)
    assert part.wait(20) == -signal.SIGKILL
    assert select.select([watched], [], [], 20)[0]
    os.close(watched)


def test_a_process_group_gets_signals_together() -> None:
    code = "import os, time; os.fork(); print(os.getpgid(0), flush=True); time.sleep(60)"
    with PythonProcess("-c", code, stderr=subprocess.DEVNULL, new_group=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [f"{process.pid}\n"] * 2
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL
        assert process.stdout.read() == "", "both have ended"


def test_this_session_starts_services_through_the_fork_server() -> None:
    process = ChildProcess(["penstock", "--version"], {})
    assert process.wait() == 0
    assert isinstance(process._process, ForkedProcess)
    process.close()
