"""The same through real Celery workers: killed, stopped, and given a task twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis as sync_redis
from celery import Celery
from celery.result import AsyncResult

from penstock.contract.errors import RequestError
from penstock.producer.batch.celery_app import celery_url, make_app
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.tasks import GENERATE, RUN_FILE
from tests.producer.batch.conftest import (
    Row,
    chat_row,
    kill_group,
    num_lines,
    process,
    rows_in,
    wait_for_lines,
    write_rows,
)

WORKER = (sys.executable, "-m", "celery", "-A", "penstock.producer.batch.app", "worker", "--concurrency", "1")
PENSTOCK = (sys.executable, "-m", "penstock")


@contextmanager
def worker(url: str, *, visibility_timeout_s: int = 2, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A worker as compose starts it; its log is its stdout."""
    settings = {
        "PENSTOCK_CELERY_VISIBILITY_TIMEOUT_S": str(visibility_timeout_s),
        "PENSTOCK_CELERY_SOFT_SHUTDOWN_S": "0",
    }
    with process(*WORKER, "--loglevel", "INFO", PENSTOCK_REDIS_URL=url, **settings, **env) as running:
        yield running


@pytest.fixture
def app(served_url: str) -> Iterator[Celery]:
    """What a program that sends tasks holds; each test starts without tasks."""
    with sync_redis.Redis.from_url(served_url) as client:
        for key in client.scan_iter("penstock:celery:*"):
            client.delete(key)
    app = make_app(CelerySettings.load(), served_url)
    yield app
    app.close()


def send_file(app: Celery, tmp_path: Path, rows: list[Row]) -> AsyncResult:
    source = write_rows(tmp_path / "in.jsonl", rows)
    options = {"input": str(source), "output": str(tmp_path / "out.jsonl"), "max_in_flight": 16}
    return app.send_task(RUN_FILE, kwargs=options)


def assert_whole(tmp_path: Path, rows: list[Row]) -> None:
    assert num_lines(tmp_path / "out.jsonl") == len(rows)
    assert {row["custom_id"] for row in rows_in(tmp_path / "out.jsonl")} == {row["custom_id"] for row in rows}
    assert not (tmp_path / "out.jsonl.partial").exists()


def output_of(running: subprocess.Popen[str]) -> str:
    os.killpg(running.pid, signal.SIGKILL)
    return running.communicate(timeout=10)[0]


def test_200_rows_through_a_worker_that_is_killed_once(app: Celery, served_url: str, tmp_path: Path) -> None:
    rows = [chat_row(f"row-{i}", max_tokens=30) for i in range(200)]
    task = send_file(app, tmp_path, rows)
    with worker(served_url) as first:
        wait_for_lines(tmp_path / "out.jsonl.partial", 40, first)
        kill_group(first)
    written = rows_in(tmp_path / "out.jsonl.partial")
    assert 40 <= len(written) < 200

    with worker(served_url):
        said = task.get(timeout=60, interval=0.05)

    assert (said["num_answered"], said["num_failed"]) == (200, 0)
    assert_whole(tmp_path, rows)
    assert rows_in(tmp_path / "out.jsonl")[: len(written)] == written


def test_a_task_that_outlives_its_visibility_is_not_run_twice_at_once(
    app: Celery, served_url: str, tmp_path: Path
) -> None:
    rows = [chat_row(f"row-{i}", max_tokens=400) for i in range(60)]
    task = send_file(app, tmp_path, rows)
    with worker(served_url, visibility_timeout_s=1) as first:
        wait_for_lines(tmp_path / "out.jsonl.partial", 1, first)
        with worker(served_url, visibility_timeout_s=1) as second:
            task.get(timeout=60, interval=0.05)
            wait_until_empty(served_url)
            log = output_of(second)
    assert "another run is writing" in log
    assert "Traceback" not in log
    assert_whole(tmp_path, rows)


def wait_until_empty(url: str) -> None:
    """Returns when no task is queued or taken."""
    deadline = time.monotonic() + 30
    with sync_redis.Redis.from_url(url) as client:
        while client.exists("penstock:celery:penstock-batch", "penstock:celery:unacked"):
            assert time.monotonic() < deadline, client.keys("penstock:celery:*")
            time.sleep(0.05)


def test_a_stopped_worker_gives_its_task_back_at_once(app: Celery, served_url: str, tmp_path: Path) -> None:
    rows = [chat_row(f"row-{i}", max_tokens=60) for i in range(100)]
    task = send_file(app, tmp_path, rows)
    with worker(served_url, visibility_timeout_s=3600, REMAP_SIGTERM="SIGQUIT") as first:
        wait_for_lines(tmp_path / "out.jsonl.partial", 10, first)
        first.terminate()
        first.communicate(timeout=20)
    assert num_lines(tmp_path / "out.jsonl.partial") < 100

    with worker(served_url, visibility_timeout_s=3600):
        assert task.get(timeout=30, interval=0.05)["num_answered"] == 100
    assert_whole(tmp_path, rows)


def test_one_answer_as_a_task_and_its_text_in_no_log(app: Celery, served_url: str) -> None:
    with worker(served_url) as running:
        chat = app.send_task(GENERATE, kwargs={"messages": [{"role": "user", "content": "secret"}], "max_tokens": 5})
        text = app.send_task(GENERATE, args=["secret"], kwargs={"max_tokens": 3, "model": "reference"})
        wrong = app.send_task(GENERATE, args=["secret"], kwargs={"max_tokns": 3})
        answers = [task.get(timeout=30, interval=0.05) for task in (chat, text)]
        with pytest.raises(RequestError, match="unknown field: max_tokns"):
            wrong.get(timeout=30, interval=0.05)
        log = output_of(running)
    assert answers[0]["object"] == "chat.completion"
    assert answers[0]["usage"]["completion_tokens"] == 5
    assert len(answers[1]["choices"][0]["text"]) == 3
    assert GENERATE in log
    assert "succeeded" in log
    for secret in ("secret", answers[0]["choices"][0]["message"]["content"], answers[1]["choices"][0]["text"]):
        assert f"'{secret}'" not in log


def test_pickle_is_refused(app: Celery, served_url: str, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    sender = Celery(broker=celery_url(served_url))
    sender.conf.update(app.conf.changes)
    sender.conf.accept_content = ["pickle"]
    with worker(served_url) as running:
        sender.send_task(GENERATE, args=[Bomb()], serializer="pickle")
        good = app.send_task(GENERATE, args=["x"], kwargs={"max_tokens": 1})
        assert good.get(timeout=30, interval=0.05)["choices"]
        log = output_of(running)
    sender.close()
    assert "Refusing to deserialize" in log
    assert not (tmp_path / "exploded").exists()


def test_a_batch_by_command_through_a_worker(app: Celery, served_url: str, tmp_path: Path) -> None:
    rows = [chat_row("good"), chat_row("bad", n=99)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    twice = write_rows(tmp_path / "twice.jsonl", rows * 2)
    command = (*PENSTOCK, "batch", "run", "--via-celery", "--redis-url", served_url)
    with (
        worker(served_url),
        process(*command, str(source), str(tmp_path / "out.jsonl")) as good,
        process(*command, str(twice), str(tmp_path / "twice.out")) as wrong,
    ):
        said, refused = (run.communicate(timeout=30)[0] for run in (good, wrong))
    assert (good.returncode, wrong.returncode) == (1, 2)
    assert "1 answered, 1 failed" in said
    assert "line 3: custom_id 'good' stands in line 1" in refused
    assert_whole(tmp_path, rows)


def test_celery_reads_the_addresses_we_write() -> None:
    assert celery_url("unix:///tmp/redis.sock") == "redis+socket:///tmp/redis.sock"
    assert celery_url("rediss://:secret@host:1/2") == "rediss://:secret@host:1/2"


def test_worker_without_redis_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    done = subprocess.run(WORKER, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0
    assert "PENSTOCK_REDIS_URL" in done.stdout + done.stderr
