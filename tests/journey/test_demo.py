"""The whole system on one machine, as in the first steps of the README: real processes, the real small model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from fakes.waiting import wait_until

pytestmark = pytest.mark.model


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temp folder with a short path, as sockets need it. Asserts at the end that no files of ours remain."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield folder
    left = list(folder.glob("penstock*"))
    shutil.rmtree(folder)
    assert left == []


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *arguments],
        env={
            **clean,
            "TMPDIR": str(folder),
            "PENSTOCK_RUNTIME_DIR": str(folder / "run"),
            "PENSTOCK_LOG_FORMAT": "console",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def wait_until_gone(processes: list[psutil.Process], timeout_s: float = 60) -> None:
    _gone, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert [process for process in alive if is_at_work(process)] == []


def is_at_work(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_node(process: psutil.Process) -> bool:
    try:
        return "node" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def wait_for_children(process: subprocess.Popen[str], number: int) -> None:
    wait_until(lambda: len(psutil.Process(process.pid).children(recursive=True)) >= number)


def start_serve(folder: Path) -> tuple[subprocess.Popen[str], str, str]:
    """A served model: the process, the base URL and the ready curl line."""
    process = start(folder, "serve", "--ephemeral", "--port", "0")
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        if match := re.search(r"at (http://\S+)/v1", line):
            url = match[1]
        if line.strip().startswith("curl"):
            return process, url, line.strip()
    raise AssertionError(process.communicate()[1])


@pytest.mark.slow  # CI runs `make demo` each time.
def test_demo_streams_a_sensible_answer_and_its_speed(folder: Path) -> None:
    demo = start(folder, "demo", "--prompt", "What is gravity?", "--max-tokens", "24")
    out, errors = demo.communicate(timeout=100)
    assert demo.returncode == 0, errors
    assert "> What is gravity?" in out
    assert "Gravity is" in out
    assert re.search(r"24 tokens: the first after \d+ ms, the rest at \d+\.\d tokens/s", out)
    assert "all keys match the jobs" in out


@pytest.mark.slow
def test_demo_of_an_unknown_model_says_why(folder: Path) -> None:
    demo = start(folder, "demo", "--model", "/nonexistent/model.gguf")
    _, errors = demo.communicate(timeout=100)
    assert demo.returncode == 1
    assert "/nonexistent/model.gguf" in errors
    assert "Traceback" not in errors


def test_ctrl_c_while_the_model_loads_leaves_nothing(folder: Path) -> None:
    demo = start(folder, "demo")
    # Redis, node and gateway, each with its guard.
    wait_for_children(demo, 6)
    processes = family(demo)

    os.killpg(demo.pid, signal.SIGINT)
    _, errors = demo.communicate(timeout=60)

    assert demo.returncode == 130
    assert "Traceback" not in errors
    wait_until_gone(processes)


def test_serve_answers_until_it_is_told_to_stop(folder: Path) -> None:
    serve, url, curl = start_serve(folder)
    processes = family(serve)
    body = json.loads(curl[curl.index("{") : curl.rindex("}") + 1])
    answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": False, "max_tokens": 8}, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"]

    serve.terminate()
    _, errors = serve.communicate(timeout=60)

    assert serve.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors
    wait_until_gone(processes)


@pytest.mark.slow
def test_killed_serve_leaves_nothing(folder: Path) -> None:
    serve, _, _ = start_serve(folder)
    processes = family(serve)
    assert len(processes) >= 7

    serve.kill()
    serve.communicate()

    wait_until_gone(processes)


@pytest.mark.slow
def test_serve_starts_its_node_again_and_says_why_it_ended(folder: Path) -> None:
    serve, url, curl = start_serve(folder)
    processes = family(serve)
    try:
        next(process for process in reversed(processes) if is_node(process)).kill()
        assert serve.stderr is not None
        told = (line.partition(" WARNING ")[2] for line in serve.stderr if line.startswith("serve "))
        said = "".join(iter(lambda: next(filter(None, told)), AGAIN))
        assert said.startswith("node ended with status 137 (SIGKILL"), said
        assert said.endswith("; it starts again in 0.5 s\n")
        body = json.loads(curl[curl.index("{") : curl.rindex("}") + 1])
        answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": False, "max_tokens": 8}, timeout=60)
        assert answer.status_code == 200
    finally:
        processes += family(serve)
        serve.terminate()
        serve.communicate(timeout=60)
    assert serve.returncode == 128 + signal.SIGTERM
    wait_until_gone(processes)


AGAIN = "node serves again\n"


@pytest.mark.slow
def test_taken_port_is_one_clear_error(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        serve = start(folder, "serve", "--ephemeral", "--port", str(other.getsockname()[1]))
        _, errors = serve.communicate(timeout=100)
    assert serve.returncode == 2
    said = errors.splitlines()[-1]
    assert re.fullmatch(r"penstock: port \d+ on 127.0.0.1 is in use; choose another with --port, .*", said), errors
    assert "starting" not in errors
