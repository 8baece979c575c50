"""Progress messages of a Celery task delay nothing, and a retry that Celery's Redis cannot store loses no task."""

from __future__ import annotations

import fcntl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis as sync_redis
from celery.signals import worker_shutdown
from fakes.waiting import wait_until

from penstock.contract.errors import RequestError, UnavailableError
from penstock.producer.batch import records
from penstock.producer.batch.celery_app import make_app
from penstock.producer.batch.records import BatchProgress
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.tasks import RUN_FILE, filled_from, reporting
from penstock.queue.broker import redis_clock
from tests.producer.batch.conftest import chat_row, write_rows


def test_progress_that_cannot_be_stored_neither_fails_nor_blocks_the_run() -> None:
    release, stored = threading.Event(), []

    def store(progress: BatchProgress) -> None:
        stored.append(progress)
        release.wait(60)
        raise UnavailableError("Redis is unreachable")

    started_s = time.monotonic()
    with reporting(store) as report:
        for num_rows in range(1000):
            report(BatchProgress(num_rows))
        assert time.monotonic() - started_s < 30
        release.set()
    assert stored == [BatchProgress(0)]


def test_the_last_report_is_stored_before_the_block_ends() -> None:
    stored = []

    def store(progress: BatchProgress) -> None:
        time.sleep(0.1)
        stored.append(progress)

    with reporting(store) as report:
        report(BatchProgress(1))
    assert stored == [BatchProgress(1)]


def test_the_text_of_the_previous_task_is_not_read_again() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "{previous} or {previous}"}]}], "n": 2}
    written = "{previous} {{a.text}}"
    content = [{"type": "text", "text": f"{written} or {written}"}]
    assert filled_from(body, written) == {"messages": [{"role": "user", "content": content}], "n": 2}
    assert filled_from({"prompt": "<{previous}>"}, "") == {"prompt": "<>"}
    with pytest.raises(RequestError, match=r"messages must contain \{previous\}"):
        filled_from({"messages": [{"role": "user", "content": "x"}], "user": "{previous}"}, "text")


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_rows_of_a_task_wait_by_the_clock_of_redis(
    redis_url: str, served_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """The clock of the worker's machine is two hours wrong."""
    app = make_app(CelerySettings(broker_url=redis_url), served_url)
    source = write_rows(tmp_path / "in.jsonl", [chat_row("a")])
    begins_s, real = time.time() + 1.0, time.time
    clock = SimpleNamespace(time=lambda: real() + ahead_s, monotonic=time.monotonic, sleep=time.sleep)
    for module in (records, redis_clock):
        monkeypatch.setattr(module, "time", clock)
    options = {"input": str(source), "output": str(tmp_path / "out.jsonl"), "not_before_s": begins_s}
    task = app.tasks[RUN_FILE]
    task.push_request(id=f"late{ahead_s}", args=[], kwargs=options, called_directly=False, delivery_info={}, headers={})
    assert task.run(**options)["num_answered"] == 1
    assert 0 <= real() - begins_s < 60
    worker_shutdown.send(sender=app)
    app.close()


def test_task_whose_retry_celerys_redis_cannot_store_continues_in_its_worker(
    redis_url: str, served_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(CelerySettings(broker_url=redis_url, visibility_timeout_s=1), served_url)
    source = write_rows(tmp_path / "in.jsonl", [chat_row("a")])

    def run() -> dict[str, Any]:
        # What a worker does with a message that it took.
        task, options = app.tasks[RUN_FILE], {"input": str(source), "output": str(tmp_path / "out.jsonl")}
        task.push_request(id="kept", args=[], kwargs=options, called_directly=False, delivery_info={}, headers={})
        return dict(task.run(**options))

    with sync_redis.Redis.from_url(redis_url) as client, ThreadPoolExecutor(1) as thread:
        client.config_set("maxmemory", "1")
        with (tmp_path / "out.jsonl.partial").open("ab") as partial:
            fcntl.flock(partial, fcntl.LOCK_EX)
            done = thread.submit(run)
            wait_until(lambda: "task.retries_in_place" in caplog.text or done.done())
        assert done.result(timeout=60)["num_answered"] == 1
    # A worker's end closes the client that its tasks share.
    worker_shutdown.send(sender=app)
    app.close()
