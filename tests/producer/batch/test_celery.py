"""Batches through real Celery workers: killed, stopped, and given a task twice."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import redis as sync_redis
from celery import Celery
from celery.backends.base import BaseBackend
from celery.result import AsyncResult
from fakes.processes.python_process import run_python
from fakes.waiting import wait_until

from penstock.contract.errors import RequestError
from penstock.producer.batch import celery_app
from penstock.producer.batch.celery_app import celery_url, make_app
from penstock.producer.batch.records import Batch, BatchProgress
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.task_leases import LeaseObserver
from penstock.producer.batch.tasks import GENERATE, RUN_FILE
from tests.producer.batch.conftest import (
    CELERY_IMPORTS,
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
QUIET = ("--loglevel", "INFO", "--without-mingle", "--without-gossip")
PENSTOCK = (sys.executable, "-m", "penstock")


@contextmanager
def worker(
    url: str, *words: str, visibility_timeout_s: int = 2, log: Path | None = None, **env: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a worker as compose does."""
    settings = {
        "PENSTOCK_REDIS_URL": url,
        "PENSTOCK_CELERY_VISIBILITY_TIMEOUT_S": str(visibility_timeout_s),
        "PENSTOCK_CELERY_SOFT_SHUTDOWN_S": "0",
    }
    # Metrics of several processes are a mode that prometheus_client takes when it is imported.
    forked = "PENSTOCK_CELERY_METRICS_PORT" not in env
    with TemporaryDirectory(prefix="worker-") as folder:
        said = log or Path(folder) / "log"
        with process(*WORKER, *QUIET, *words, log=said, forked=forked, **settings, **env) as running:
            yield running


@pytest.fixture(scope="module")
def idle_log(served_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The log of a worker that several tests share, those that leave it alive."""
    log = tmp_path_factory.mktemp("worker") / "log"
    with worker(served_url, visibility_timeout_s=1, log=log):
        yield log


@pytest.fixture
def app(served_url: str) -> Iterator[Celery]:
    """A Celery app as a program that sends tasks has it."""
    app = make_app(CelerySettings.load(), served_url)
    yield app
    app.close()


def send_file(app: Celery, tmp_path: Path, rows: list[Row]) -> AsyncResult:
    source = write_rows(tmp_path / "in.jsonl", rows)
    options = {"input": str(source), "output": str(tmp_path / "out.jsonl"), "max_in_flight": 16}
    return app.send_task(RUN_FILE, kwargs=options)


def slow(case: tuple[object, ...]) -> Any:
    """Mark as slow: only `make check-full` runs it."""
    return pytest.param(*case, marks=pytest.mark.slow)


def assert_whole(tmp_path: Path, rows: list[Row]) -> None:
    assert num_lines(tmp_path / "out.jsonl") == len(rows)
    assert {row["custom_id"] for row in rows_in(tmp_path / "out.jsonl")} == {row["custom_id"] for row in rows}
    assert not (tmp_path / "out.jsonl.partial").exists()


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


@pytest.mark.parametrize("lease", [{"PENSTOCK_CELERY_TASK_LEASE_S": "1"}, slow(({},))])
def test_batch_of_a_killed_worker_continues_in_a_healthy_one(
    app: Celery, served_url: str, tmp_path: Path, lease: dict[str, str]
) -> None:
    rows = [chat_row(f"row-{i}", max_tokens=100) for i in range(200)]
    partial, logs = tmp_path / "out.jsonl.partial", [tmp_path / f"{number}.log" for number in range(2)]
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(served_url, visibility_timeout_s=300, log=log, **lease)) for log in logs]
        wait_until(lambda: all("ready." in log.read_text() for log in logs))
        task = send_file(app, tmp_path, rows)
        wait_until(lambda: num_lines(partial) > 0)
        killed = next(number for number, log in enumerate(logs) if f"[{task.id}] received" in log.read_text())
        healthy, log = workers[1 - killed], logs[1 - killed]
        kill_group(workers[killed])
        killed_s, written = time.monotonic(), num_lines(partial)
        assert written < 200
        wait_for_lines(partial, written + 1, healthy)
        assert time.monotonic() - killed_s < 60  # the visibility lasts for 300 s
        assert task.get(timeout=60, interval=0.05)["num_answered"] == 200
        wait_until(lambda: not has_tasks(served_url))
    assert "the task is queued again" in log.read_text() and "Traceback" not in log.read_text()
    assert_whole(tmp_path, rows)


@pytest.mark.slow
def test_a_task_longer_than_its_lease_stays_with_its_worker(app: Celery, served_url: str, tmp_path: Path) -> None:
    rows = [chat_row(f"row-{i}", max_tokens=1500) for i in range(16)]
    logs = [tmp_path / f"{i}.log" for i in range(2)]
    lease = {"visibility_timeout_s": 1, "PENSTOCK_CELERY_TASK_LEASE_S": "1"}
    with worker(served_url, log=logs[0], **lease), worker(served_url, log=logs[1], **lease):
        started_s = time.monotonic()
        said = send_file(app, tmp_path, rows).get(timeout=60, interval=0.05)
        assert time.monotonic() - started_s > 2.5, "longer than lease and visibility"
        assert said["num_answered"] == 16
        wait_until(lambda: not has_tasks(served_url))
    logged = "".join(log.read_text() for log in logs)
    assert logged.count("received") == 1 and "another run is writing" not in logged


def test_leases_are_judged_by_one_clock_and_begin_anew_after_a_gap() -> None:
    observer = LeaseObserver(10, max_gap_s=5, now_s=0)
    assert observer.silent({"dead": 7.0, "living": 1.0}, 4) == []
    assert observer.silent({"dead": 7.0, "living": 2.0}, 8) == []
    assert observer.silent({"dead": 7.0, "living": 3.0}, 13) == []
    assert observer.silent({"dead": 7.0, "living": 4.0}, 14) == ["dead"]
    # Redis was away for longer than a gap: no worker could renew.
    assert observer.silent({"dead": 7.0, "living": 4.0}, 30) == []
    assert observer.silent({"dead": 7.0}, 35) == []
    assert observer.silent({"dead": 7.0}, 40) == ["dead"]


def test_a_task_that_outlives_its_visibility_is_not_run_twice_at_once(
    app: Celery, served_url: str, tmp_path: Path
) -> None:
    rows = [chat_row(f"row-{i}", max_tokens=100) for i in range(40)]
    task = send_file(app, tmp_path, rows)
    log = tmp_path / "second.log"
    with worker(served_url, visibility_timeout_s=1) as first:
        wait_for_lines(tmp_path / "out.jsonl.partial", 1, first)
        # It stands still in the midst of the run until the other one has been given the task too.
        os.killpg(first.pid, signal.SIGSTOP)
        with worker(served_url, visibility_timeout_s=1, log=log):
            wait_until(lambda: "another run is writing" in log.read_text())
            os.killpg(first.pid, signal.SIGCONT)
            assert task.get(timeout=60, interval=0.05)["num_answered"] == 40
            wait_until(lambda: not has_tasks(served_url))
    assert "Traceback" not in log.read_text()
    assert_whole(tmp_path, rows)


def has_tasks(url: str) -> bool:
    """Whether any task is queued or taken."""
    with sync_redis.Redis.from_url(url) as client:
        return bool(client.exists("penstock:celery:penstock-batch", "penstock:celery:unacked"))


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_stopped_worker_returns_its_task_at_once(app: Celery, served_url: str, tmp_path: Path, pool: str) -> None:
    rows = [chat_row(f"row-{i}", max_tokens=100) for i in range(100)]
    task = send_file(app, tmp_path, rows)
    with worker(served_url, "--pool", pool, visibility_timeout_s=3600, REMAP_SIGTERM="SIGQUIT") as first:
        wait_for_lines(tmp_path / "out.jsonl.partial", 10, first)
        first.terminate()
        first.communicate(timeout=60)
    assert num_lines(tmp_path / "out.jsonl.partial") < 100

    with worker(served_url, visibility_timeout_s=3600):
        assert task.get(timeout=60, interval=0.05)["num_answered"] == 100
    assert_whole(tmp_path, rows)


def test_answer_as_a_task_whose_text_is_in_no_log(app: Celery, idle_log: Path) -> None:
    messages = [{"role": "user", "content": "unspeakable"}]
    chat = app.send_task(GENERATE, kwargs={"messages": messages, "max_tokens": 50})
    text = app.send_task(GENERATE, args=["unspeakable"], kwargs={"max_tokens": 40, "model": "reference"})
    wrong = app.send_task(GENERATE, args=["unspeakable"], kwargs={"max_tokns": 3})
    spoken, written = (task.get(timeout=60, interval=0.05) for task in (chat, text))
    with pytest.raises(RequestError, match="max_tokns: unknown field"):
        wrong.get(timeout=60, interval=0.05)

    assert spoken["object"] == "chat.completion"
    assert spoken["usage"]["completion_tokens"] == 50
    assert len(written["choices"][0]["text"]) == 40
    log = idle_log.read_text()
    assert f"{GENERATE}[{text.id}] succeeded" in log
    for secret in ("unspeakable", spoken["choices"][0]["message"]["content"], written["choices"][0]["text"]):
        assert secret not in log


def test_a_task_says_what_its_submission_waits_for(app: Celery, idle_log: Path) -> None:
    """The Redis of these tests has no append-only file, so it can promise `memory` only."""
    sent = {
        level: app.send_task(GENERATE, args=["x"], kwargs={"max_tokens": 1, "durability": level})
        for level in ("memory", "fsync", "disk")
    }
    assert sent["memory"].get(timeout=60, interval=0.05)["object"] == "text_completion"
    with pytest.raises(RequestError, match="durability: fsync is not possible"):
        sent["fsync"].get(timeout=60, interval=0.05)
    with pytest.raises(RequestError, match="durability must be one of memory, fsync, replicated, not 'disk'"):
        sent["disk"].get(timeout=60, interval=0.05)


def test_a_task_delivered_again_is_the_same_job(app: Celery, idle_log: Path) -> None:
    options = {"args": ["once"], "kwargs": {"max_tokens": 5}, "task_id": "delivered-twice"}
    task = app.send_task(GENERATE, **options)
    first = task.get(timeout=60, interval=0.05)
    # Before the second one, whose result may come at once.
    task.forget()
    second = app.send_task(GENERATE, **options).get(timeout=60, interval=0.05)
    assert second["id"] == first["id"]


def test_locked_batch_is_retried_until_it_is_free(app: Celery, idle_log: Path, tmp_path: Path) -> None:
    with (tmp_path / "out.jsonl.partial").open("ab") as partial:
        fcntl.flock(partial, fcntl.LOCK_EX)
        task = send_file(app, tmp_path, [chat_row("a")])
        wait_until(lambda: idle_log.read_text().count(f"{task.id}] retry") > 4)
        assert task.state == "RETRY"
        assert str(task.info).startswith("another run is writing")
    assert task.get(timeout=60, interval=0.05)["num_answered"] == 1


def test_pickle_is_refused(app: Celery, served_url: str, idle_log: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    sender = Celery(broker=celery_url(served_url))
    sender.conf.update({**app.conf.changes, "accept_content": ["pickle"]})
    sender.send_task(GENERATE, args=[Bomb()], serializer="pickle")
    sender.close()
    good = app.send_task(GENERATE, args=["x"], kwargs={"max_tokens": 1})
    assert good.get(timeout=60, interval=0.05)["choices"]
    assert "Refusing to deserialize" in idle_log.read_text()
    assert not (tmp_path / "exploded").exists()


def test_a_batch_by_command_through_a_worker(served_url: str, idle_log: Path, tmp_path: Path) -> None:
    rows = [chat_row("good"), chat_row("bad", n=99)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    twice = write_rows(tmp_path / "twice.jsonl", rows * 2)
    command = (*PENSTOCK, "batch", "run", "--via-celery", "--redis-url", served_url)
    with (
        process(*command, str(source), str(tmp_path / "out.jsonl")) as good,
        process(*command, str(twice), str(tmp_path / "twice.out")) as wrong,
    ):
        said, refused = (run.communicate(timeout=60)[0] for run in (good, wrong))
    assert (good.returncode, wrong.returncode) == (1, 2)
    assert "1 answered, 1 failed" in said
    assert "line 3: custom_id 'good' is already used in line 1" in refused
    assert_whole(tmp_path, rows)


def test_task_that_advances_between_two_reads_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = {"status": "PROGRESS", "result": asdict(BatchProgress(2))}
    states = [progress, progress, {"status": "FAILURE", "result": RequestError("the input is gone")}]

    class Moving(BaseBackend):  # type: ignore[misc]
        def get_task_meta(self, task_id: str) -> dict[str, object]:
            return states.pop(0) if len(states) > 1 else states[0]

    task = AsyncResult("id", backend=Moving(Celery(set_as_current=False)))
    monkeypatch.setattr(celery_app, "make_app", lambda *_: SimpleNamespace(send_task=lambda *_, **__: task))
    seen: list[BatchProgress] = []
    with pytest.raises(RequestError, match="gone"):
        celery_app.run_in_worker("unix:///nowhere", Batch("in", "out"), seen.append)
    assert set(seen) == {BatchProgress(2)}


def test_celery_accepts_our_redis_urls() -> None:
    assert celery_url("unix:///tmp/redis.sock") == "redis+socket:///tmp/redis.sock"
    assert celery_url("rediss://:secret@host:1/2") == "rediss://:secret@host:1/2"


def test_worker_without_redis_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    done = run_python(*WORKER[1:], imports=CELERY_IMPORTS)
    assert done.returncode == 2
    assert "PENSTOCK_REDIS_URL" in done.stderr and done.stderr.count("\n") == 1


def test_a_worker_logs_as_the_other_processes_do(app: Celery, idle_log: Path) -> None:
    app.send_task(GENERATE, args=["logged"], kwargs={"max_tokens": 2}).get(timeout=60, interval=0.05)

    def events() -> list[dict[str, str]]:
        return [json.loads(line) for line in idle_log.read_text().splitlines() if line.startswith("{")]

    done = wait_until(lambda: [event for event in events() if "succeeded" in event["message"]])
    assert done[0]["level"] == "INFO" and done[0]["time"]
