"""Tasks of a worker process share its client: those that come soon after others begin together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.producer.batch import worker_process
from penstock.producer.batch.worker_process import WorkerClient
from penstock.producer.client import AsyncClient


@pytest.fixture
def worker_client(redis_url: str) -> Iterator[WorkerClient]:
    client = WorkerClient(lambda: redis_url, num_threads=5)
    yield client
    client.close()


async def nothing(client: AsyncClient) -> str:
    return "done"


def test_a_process_with_one_thread_never_waits(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "TOGETHER_S", 3600)
    client = WorkerClient(lambda: redis_url)
    assert [client.run(nothing) for _ in range(3)] == ["done"] * 3
    client.close()


def test_a_task_that_comes_late_begins_at_once(worker_client: WorkerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "TOGETHER_S", 0)
    assert [worker_client.run(nothing) for _ in range(3)] == ["done"] * 3


def test_tasks_that_come_soon_after_another_begin_in_one_round_of_the_loop(
    worker_client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "TOGETHER_S", 0.2)
    worker_client.run(nothing)
    order = together(worker_client, 3)
    assert order[:4] == ["begun"] * 3 + ["next round"]


def test_tasks_of_all_threads_begin_without_waiting(
    worker_client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "TOGETHER_S", 3600)
    worker_client.run(nothing)
    assert together(worker_client, 5).count("begun") == 5


def test_a_canceled_wait_leaves_the_others_alone(worker_client: WorkerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "TOGETHER_S", 3600)
    worker_client.run(nothing)
    running = worker_client._of_this_process()
    canceled = running.loop.post(running.call(nothing))
    canceled.cancel()
    assert together(worker_client, 5).count("begun") == 5


def together(client: WorkerClient, num_calls: int) -> list[str]:
    """Call from as many threads, none of which ends before all have begun. Return the order of events."""
    may_end = asyncio.Event()
    order = list[str]()

    async def work(client: AsyncClient) -> None:
        order.append("begun")
        asyncio.get_running_loop().call_soon(order.append, "next round")
        if order.count("begun") == num_calls:
            may_end.set()
        await may_end.wait()

    with ThreadPoolExecutor(num_calls) as threads:
        for end in [threads.submit(client.run, work) for _ in range(num_calls)]:
            end.result(10)
    return order
