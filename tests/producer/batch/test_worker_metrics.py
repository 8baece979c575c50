"""A Celery worker's metrics, scraped while it works."""

from __future__ import annotations

import threading
import time
import urllib.request
from pathlib import Path

import pytest
from fakes.waiting import wait_until
from faults.tools.redis_process import free_port
from prometheus_client.parser import text_string_to_metric_families

from penstock.producer.batch.celery_app import make_app
from penstock.producer.batch.installation import STORED_BATCHES
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.tasks import GENERATE, RUN_FILE
from penstock.producer.batch.worker_metrics import MAX_AGE_S, LatestNumber
from tests.producer.batch.conftest import chat_row, kill_group, wait_for_lines
from tests.producer.batch.test_celery import send_file, worker

pytestmark = pytest.mark.process


def scrape(port: int) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name.removeprefix("penstock_batch_"), *(sample.labels[name] for name in sorted(sample.labels))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_of_a_worker_include_its_child_processes(served_url: str, tmp_path: Path) -> None:
    port, folders = free_port(), tmp_path / "folders"
    folders.mkdir()
    app = make_app(CelerySettings.load(), served_url)
    rows = [chat_row(f"row-{i}", max_tokens=5) for i in range(20)]
    rows[7]["body"]["temperature"] = -1
    settings = {"PENSTOCK_CELERY_METRICS_PORT": str(port), "TMPDIR": str(folders)}
    with worker(served_url, **settings) as running:
        assert send_file(app, tmp_path, rows).get(timeout=60, interval=0.05)["num_failed"] == 1
        app.send_task(GENERATE, kwargs={"prompt": "hi", "max_tokens": 3}).get(timeout=60, interval=0.05)
        wrong = app.send_task(GENERATE, kwargs={"prompt": "hi", "temperature": -1})
        wrong.get(timeout=60, interval=0.05, propagate=False)
        wait_until(lambda: scrape(port).get(("tasks_total", "failed", GENERATE)) == 1)
        found = scrape(port)
        running.terminate()
        running.communicate(timeout=60)
    app.close()
    assert found["rows_total", "answered"] == 19
    assert found["rows_total", "failed"] == 1
    # A row whose result could not be read is submitted again.
    assert 20 <= found["jobs_submitted_total",] <= 22, "the wrong row and the wrong task are not submitted"
    assert found["tokens_total", "completion"] > 19
    assert found["tasks_total", "succeeded", RUN_FILE] == found["tasks_total", "succeeded", GENERATE] == 1
    assert found["task_seconds_count", GENERATE] == 2
    assert found["tasks_running", RUN_FILE] == found["rows_left",] == found["tasks_waiting",] == 0
    assert found["process_resident_memory_bytes",] > 1 << 20
    assert [*folders.glob("penstock-metrics-*")] == []


def test_waiting_and_running_tasks_are_those_of_the_moment(served_url: str, tmp_path: Path) -> None:
    port = free_port()
    app = make_app(CelerySettings.load(), served_url)
    rows = [chat_row(f"row-{i}", max_tokens=200) for i in range(100)]
    task = send_file(app, tmp_path, rows)
    lease = {"PENSTOCK_CELERY_TASK_LEASE_S": "1"}
    with worker(served_url, PENSTOCK_CELERY_METRICS_PORT=str(port), **lease) as running:
        wait_for_lines(tmp_path / "out.jsonl.partial", 5, running)
        waiting = [app.send_task(GENERATE, kwargs={"prompt": "hi", "max_tokens": 3}) for _ in range(4)]
        found: dict[tuple[str, ...], float] = {}

        def shows_both() -> bool:
            found.update(scrape(port))
            # The first scrape may come before Redis was read.
            return found.get(("tasks_waiting",), 0) >= 3 and found.get(("rows_left",), 100) <= 95

        wait_until(shows_both)
        assert found["tasks_running", RUN_FILE] == 1
        assert found["rows_left",] > 0
        kill_group(running)
    with worker(served_url, **lease) as last:
        assert task.get(timeout=60, interval=0.05)["num_answered"] == 100
        for one in waiting:
            one.get(timeout=60, interval=0.05)
        assert last.poll() is None
    app.close()


def test_without_a_port_nothing_is_served_and_no_folder_is_made(served_url: str, tmp_path: Path) -> None:
    app = make_app(CelerySettings.load(), served_url)
    assert app.steps["worker"] == {STORED_BATCHES}
    app.close()


def test_a_scrape_waits_little_for_a_redis_that_is_away_and_reports_what_was_read_last() -> None:
    is_back, now_s = threading.Event(), 100.0
    found: list[int | None] = [3, None, 7]
    readers = set[threading.Thread]()

    def read() -> int | None:
        readers.add(threading.current_thread())
        if len(readers) == 2:
            is_back.wait(60)
        return found[len(readers) - 1]

    number = LatestNumber(read, clock=lambda: now_s)
    assert number.look() == (3, 0)
    now_s = 105.0
    began_s = time.monotonic()
    assert number.look() == (3, 5), "the reader waits for Redis"
    assert time.monotonic() - began_s < 0.2
    now_s = 100.0 + MAX_AGE_S + 1
    assert number.look() is None
    assert len(readers) == 2, "there is one reader at a time"
    is_back.set()
    wait_until(lambda: number.look() == (7, 0))
