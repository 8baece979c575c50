"""A Redis with a reference node, and processes that use them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from fakes.processes.node_process import NodeProcess
from fakes.processes.python_process import PythonProcess
from fakes.waiting import wait_until

from penstock.runtime.embedded_redis import EmbeddedRedis

Row = dict[str, Any]
WriteInput = Callable[..., Path]
MAX_NOTE_CHARS = 4000
CELERY_IMPORTS = ("celery.bin.celery", "celery.concurrency.prefork", "penstock.producer.batch.celery_app")


@contextmanager
def process(*argv: str, log: Path | None = None, forked: bool = True, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A process in its own group, killed with all its children at the end. Its output goes to `log`.

    A Python that is not `forked` starts a new interpreter. An error in the block gets the end of the log as a note.
    """
    with log.open("wb") if log else nullcontext(subprocess.PIPE) as said:
        options: dict[str, Any] = {"env": {**os.environ, **env}, "stdout": said, "stderr": subprocess.STDOUT}
        running: subprocess.Popen[str]
        program, *words = argv
        # A fork has the libraries of its server, and so its clock.
        if forked and program == sys.executable and "LD_PRELOAD" not in env:
            running = PythonProcess(*words, imports=CELERY_IMPORTS, new_group=True, **options)
        else:
            running = subprocess.Popen(argv, text=True, process_group=0, **options)
    try:
        yield running
    except BaseException as error:
        if log is not None:
            error.add_note(log.read_text(errors="replace")[-MAX_NOTE_CHARS:])
        raise
    finally:
        kill_group(running)


def kill_group(running: subprocess.Popen[str]) -> None:
    """Send SIGKILL to a process group, as when a container is killed."""
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    if running.stdout is not None:
        running.stdout.close()


def reference_node(url: str, *, pool: str = "ref", step_s: float = 0.002, **settings: Any) -> NodeProcess:
    """Run a node with the reference engine, ready when the block begins."""
    return NodeProcess(url, pool=pool, step_s=step_s, lease_ms=5000, **settings)


@pytest.fixture(scope="module")
def served_url() -> Iterator[str]:
    """URL of a Redis that the tests of a file share, with a node for the pool `ref`."""
    with EmbeddedRedis() as server, reference_node(server.url):
        yield server.url


def chat_row(custom_id: str, **body: Any) -> Row:
    messages = [{"role": "user", "content": f"what about {custom_id}?"}]
    body = {"messages": messages, "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion_row(custom_id: str, **body: Any) -> Row:
    body = {"prompt": f"once upon {custom_id}", "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write_rows(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_in(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(path: Path, count: int, writer: subprocess.Popen[str]) -> None:
    """Wait until `writer` has written this many rows."""
    wait_until(lambda: num_lines(path), lambda number: number >= count, meanwhile=lambda: writer.poll() is None)
