"""Tasks of a worker process share its client: those that begin while another runs begin together."""

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
    client = WorkerClient(lambda: redis_url)
    yield client
    client.close()


def test_a_task_alone_begins_at_once(worker_client: WorkerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "TOGETHER_S", 3600)

    async def work(client: AsyncClient) -> str:
        return "done"

    assert [worker_client.run(work) for _ in range(2)] == ["done", "done"]


def test_tasks_that_come_while_another_runs_begin_in_one_round_of_the_loop(
    worker_client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "TOGETHER_S", 0.2)
    runs, may_end = asyncio.Event(), asyncio.Event()
    order = list[str]()

    async def first(client: AsyncClient) -> None:
        runs.set()
        await may_end.wait()

    async def later(client: AsyncClient) -> None:
        order.append("begun")
        asyncio.get_running_loop().call_soon(order.append, "next round")
        if order.count("begun") == 3:
            may_end.set()
        await may_end.wait()

    with ThreadPoolExecutor(4) as threads:
        ends = [threads.submit(worker_client.run, first)]
        while not runs.is_set():
            pass
        ends += [threads.submit(worker_client.run, later) for _ in range(3)]
        for end in ends:
            end.result(10)
    assert order[:4] == ["begun"] * 3 + ["next round"]
