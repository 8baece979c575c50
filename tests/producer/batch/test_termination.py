"""`revoke(terminate=True)` of Celery: a task of penstock ends, and so do its jobs, whatever the pool does."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.concurrency.prefork import TaskPool as ProcessPool
from celery.concurrency.thread import TaskPool as ThreadPool
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from fakes.waiting import wait_until

from penstock.producer.batch import tasks as tasks_module
from penstock.producer.batch.task_request import TaskRequest
from penstock.producer.batch.tasks import GENERATE, add_tasks
from penstock.producer.batch.worker_metrics import WorkerMetrics
from penstock.producer.batch.worker_process import TaskTerminatedError, WorkerClient
from penstock.producer.client import Client
from tests.producer.client.conftest import node_on_thread


@pytest.fixture
def worker_client(redis_url: str) -> Iterator[WorkerClient]:
    client = WorkerClient(lambda: redis_url, num_threads=2)
    yield client
    client.close()


@pytest.fixture
def app(worker_client: WorkerClient) -> Celery:
    app = Celery("terminated", broker="memory://", backend="cache+memory://", set_as_current=False)
    add_tasks(app, worker_client, WorkerMetrics(), queue="q")
    return app


def request_of(app: Celery, task_id: str) -> Any:
    """Return Celery's request of a task that has begun, without a connection to a broker."""
    announced: list[tuple[Any, ...]] = []

    class Begun(TaskRequest):
        id = task_id
        task = app.tasks[GENERATE]
        time_start = 1.0
        worker_pid = 7
        _apply_result = None

        def _announce_revoked(self, *facts: Any) -> None:
            announced.append(facts)

    begun = Begun.__new__(Begun)
    begun.announced = announced
    return begun


def test_a_task_on_a_thread_ends_with_its_jobs(app: Celery, worker_client: WorkerClient, redis_url: str) -> None:
    with node_on_thread(redis_url, step_s=3600), Client(redis_url) as client:
        task, ended = app.tasks[GENERATE], list[BaseException]()

        def run() -> None:
            try:
                task.push_request(id="t1", called_directly=False, is_eager=False, timelimit=(None, None))
                task.run("hello", max_tokens=50)
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: bool(client.jobs(limit=10).jobs))
        (job,) = client.jobs(limit=10).jobs
        request = request_of(app, "t1")
        request.terminate(ThreadPool.__new__(ThreadPool))
        thread.join(60)
        assert [type(error) for error in ended] == [Ignore]
        wait_until(lambda: client.status(job.job_id).state in ("cancelled", "cancelling"))
        assert request.announced == [("terminated", True, signal.SIGTERM, False)]


def test_a_task_that_begins_after_its_termination_does_nothing(worker_client: WorkerClient) -> None:
    async def work(_: object) -> None:
        raise AssertionError("it began")

    worker_client.terminate("t2")
    with pytest.raises(TaskTerminatedError):
        worker_client.run(work, "t2")
    done = worker_client.run(lambda _: asyncio.sleep(0, "another task goes on"), "t3")
    assert done == "another task goes on"


def test_a_task_of_a_child_process_is_told_by_the_signal_that_lets_it_end_itself(app: Celery) -> None:
    told = list[tuple[int, Any]]()
    pool = ProcessPool.__new__(ProcessPool)
    pool.terminate_job = lambda pid, number=None: told.append((pid, number))
    for asked in (None, "TERM", "KILL"):
        request_of(app, "t4").terminate(pool, asked)
    assert told == [(7, signal.SIGUSR1), (7, signal.SIGUSR1), (7, signal.SIGKILL)]


@pytest.mark.parametrize(("limit_s", "expected"), [(None, Ignore), (5, SoftTimeLimitExceeded)])
def test_a_soft_signal_ends_a_task_and_a_soft_limit_fails_it(
    app: Celery, worker_client: WorkerClient, monkeypatch: pytest.MonkeyPatch, limit_s: int | None, expected: Any
) -> None:
    def interrupted(*_: Any) -> None:
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(tasks_module, "_run_with_retries", interrupted)
    task = app.tasks[GENERATE]
    task.push_request(id="t5", called_directly=False, is_eager=False, timelimit=(None, limit_s))
    with pytest.raises(expected):
        task.run("hello", max_tokens=5)
