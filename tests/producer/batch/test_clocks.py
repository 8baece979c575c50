"""Celery workers whose clocks differ by minutes or hours keep their tasks, and take over those of a dead worker."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import Celery
from fakes.waiting import wait_until
from faults.tools.redis_process import faked_clock, find_libfaketime
from redis import Redis

from penstock.producer.batch.celery_app import make_app
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.task_leases import RedisTimes
from penstock.queue.broker.redis_clock import RedisClock
from tests.producer.batch.conftest import chat_row, kill_group
from tests.producer.batch.test_celery import assert_whole, has_tasks, send_file, worker

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_libfaketime() is None, reason="libfaketime is not installed (Debian's libfaketime)"),
]
LEASE = {"visibility_timeout_s": 2, "PENSTOCK_CELERY_TASK_LEASE_S": "1.5"}
"""Celery looks every 2 s for tasks that were taken before that."""


@pytest.fixture
def app(served_url: str) -> Iterator[Celery]:
    app = make_app(CelerySettings.load(), served_url)
    yield app
    app.close()


@pytest.mark.parametrize("ahead_s", [(600, 0), (0, -600)], ids=lambda clocks: f"{clocks[0]:+d} and {clocks[1]:+d} s")
def test_a_task_that_is_tried_again_waits_no_longer_at_a_worker_with_another_clock(
    app: Celery, served_url: str, tmp_path: Path, ahead_s: tuple[int, int]
) -> None:
    first_log = tmp_path / "first.log"
    with (tmp_path / "out.jsonl.partial").open("ab") as partial, ExitStack() as stack:
        first = stack.enter_context(worker(served_url, log=first_log, **LEASE, **faked_clock(ahead_s[0])))
        fcntl.flock(partial, fcntl.LOCK_EX)
        task = send_file(app, tmp_path, [chat_row("a")])
        wait_until(lambda: first_log.read_text().count(f"{task.id}] received") == 2)
        kill_group(first)
        fcntl.flock(partial, fcntl.LOCK_UN)
        stack.enter_context(worker(served_url, log=tmp_path / "second.log", **LEASE, **faked_clock(ahead_s[1])))
        assert task.get(timeout=60, interval=0.05)["num_answered"] == 1
        wait_until(lambda: not has_tasks(served_url))


@pytest.mark.parametrize(
    "ahead_s", [-600, 600, pytest.param(-7200, marks=pytest.mark.slow), pytest.param(7200, marks=pytest.mark.slow)]
)
def test_a_worker_with_a_wrong_clock_takes_no_tasks_of_others_and_keeps_its_own(
    app: Celery, served_url: str, tmp_path: Path, ahead_s: int
) -> None:
    rows = [chat_row(f"row-{number}", max_tokens=2500) for number in range(4)]
    folders, logs = [tmp_path / name for name in ("a", "b")], [tmp_path / f"{name}.log" for name in ("wrong", "right")]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        wrong = stack.enter_context(worker(served_url, log=logs[0], **LEASE, **faked_clock(ahead_s)))
        stack.enter_context(worker(served_url, log=logs[1], **LEASE))
        wait_until(lambda: all("ready." in log.read_text() for log in logs))
        began_s = time.monotonic()
        sent = [send_file(app, folder, rows) for folder in folders]
        assert [task.get(timeout=120, interval=0.05)["num_failed"] for task in sent] == [0, 0]
        assert time.monotonic() - began_s > 4.5, "Celery has looked twice"
        wait_until(lambda: not has_tasks(served_url))
        texts = [log.read_text() for log in logs]
        assert [text.count("received") for text in texts] == [1, 1]
        assert "this machine's clock differs from that of redis" in texts[0]

        left = [send_file(app, folder, rows) for folder in _emptied(folders)]
        wait_until(lambda: [log.read_text().count("received") for log in logs] == [2, 2])
        kill_group(wrong)
        assert [task.get(timeout=120, interval=0.05)["num_failed"] for task in left] == [0, 0]
        wait_until(lambda: not has_tasks(served_url))
    for folder in folders:
        assert_whole(folder, rows)
    assert logs[1].read_text().count("received") == 3


def test_a_taken_task_has_the_time_of_redis_at_every_moment(app: Celery, served_url: str) -> None:
    num_tasks, info = 300, {"exchange": "x", "routing_key": "y"}
    with app.connection_for_read() as connection, Redis.from_url(served_url) as other, ExitStack() as looks:
        channel, clock = connection.channel(), RedisClock()
        channel.unacked_key, channel.unacked_index_key = "test_unacked", "test_unacked_index"
        held, times = (channel.global_keyprefix + key for key in (channel.unacked_key, channel.unacked_index_key))
        RedisTimes(channel, clock)
        clock.offset_s = 600.0
        earliest_s, seen, done = clock.now_s() - 60, list[bytes](), threading.Event()

        def look() -> None:
            while not done.is_set():
                seen.extend(other.zrangebyscore(times, 0, earliest_s))

        looker = looks.enter_context(ThreadPoolExecutor(1)).submit(look)
        looks.callback(done.set)
        for number in range(num_tasks):
            message = SimpleNamespace(_raw={"body": "", "properties": {}}, delivery_info=info)
            channel.qos.append(message, str(number))
        done.set()
        looker.result(20)
        assert not seen
        stored = other.hgetall(held)
        channel.qos.restore_unacked = lambda: None  # the messages are no real ones
        channel.close()
        other.delete(held, times)
    assert len(stored) == num_tasks and json.loads(stored[b"7"]) == [{"body": "", "properties": {}}, "x", "y"]


def _emptied(folders: list[Path]) -> list[Path]:
    for folder in folders:
        (folder / "out.jsonl").unlink()
    return folders
