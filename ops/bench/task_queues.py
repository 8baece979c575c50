"""Empty tasks through a task queue, for bench.studies.short_jobs: `python task_queues.py NAME REDIS_SOCKET NUM_TASKS`.

It runs in the environment of the peer `queues` and imports nothing of penstock. It starts a worker, sends the tasks,
and waits until it has all their results. Its last line is the seconds that this took.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SOCKET = os.environ.get("BENCH_REDIS_SOCKET", "")
PARALLEL = 256
"""Tasks that the asynchronous queues have open at once, as a run of penstock does."""
CONCURRENCY = "2"


def celery(num_tasks: int) -> float:
    """Run Celery's tasks."""
    from celery import group

    with _worker("celery", "-A", "task_queues:celery_app", "worker", "-c", CONCURRENCY, "-l", "ERROR"):
        celery_task.delay().get(timeout=60)
        begun_s = time.monotonic()
        group(celery_task.s() for _ in range(num_tasks)).apply_async().get(timeout=600)
        return time.monotonic() - begun_s


def dramatiq(num_tasks: int) -> float:
    """Run dramatiq's tasks."""
    with _worker("dramatiq", "task_queues", "--processes", "1", "--threads", CONCURRENCY):
        dramatiq_task.send().get_result(block=True, timeout=60_000)
        begun_s = time.monotonic()
        for message in [dramatiq_task.send() for _ in range(num_tasks)]:
            message.get_result(block=True, timeout=600_000)
        return time.monotonic() - begun_s


def taskiq(num_tasks: int) -> float:
    """Run taskiq's tasks."""

    async def one() -> None:
        await (await taskiq_task.kiq()).wait_result(check_interval=0.01, timeout=600)

    async def run() -> float:
        await taskiq_broker.startup()
        return await _timed(one, num_tasks)

    with _worker("taskiq", "worker", "task_queues:taskiq_broker", "--workers", "1"):
        return asyncio.run(run())


def arq(num_tasks: int) -> float:
    """Run arq's tasks."""
    from arq import create_pool
    from arq.jobs import ResultNotFound

    async def run() -> float:
        pool = await create_pool(ArqWorker.redis_settings)

        async def one() -> None:
            job = await pool.enqueue_job("arq_task")
            # arq reads the result before it looks whether the job is still queued, so a job may end between the two.
            try:
                await job.result(timeout=600, poll_delay=0.01)
            except ResultNotFound:
                await job.result(timeout=600, poll_delay=0.01)

        # Each that waits takes a connection, and redis-py allows a pool 100.
        return await _timed(one, num_tasks, parallel=64)

    with _worker("arq", "task_queues.ArqWorker"):
        return asyncio.run(run())


async def _timed(one: Callable[[], Any], num_tasks: int, parallel: int = PARALLEL) -> float:
    turn = asyncio.Semaphore(parallel)

    async def in_turn() -> None:
        async with turn:
            await one()

    await one()
    begun_s = time.monotonic()
    await asyncio.gather(*(in_turn() for _ in range(num_tasks)))
    return time.monotonic() - begun_s


class _worker:  # noqa: N801
    """A worker process, for the life of a `with`."""

    def __init__(self, *argv: str) -> None:
        self._argv = [os.path.join(os.path.dirname(sys.executable), argv[0]), *argv[1:]]

    def __enter__(self) -> None:
        env = os.environ | {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
        self._process = subprocess.Popen(self._argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


NAME = os.environ.get("BENCH_TASK_QUEUE", "")
if NAME == "celery":
    from celery import Celery

    celery_app = Celery("bench", broker=f"redis+socket://{SOCKET}", backend=f"redis+socket://{SOCKET}")
    celery_app.conf.worker_prefetch_multiplier = 64

    @celery_app.task(name="empty")
    def celery_task() -> None:
        """Do nothing."""
elif NAME == "dramatiq":
    import dramatiq as _dramatiq
    from dramatiq.brokers.redis import RedisBroker
    from dramatiq.results import Results
    from dramatiq.results.backends import RedisBackend

    _broker = RedisBroker(url=f"unix://{SOCKET}")
    _broker.add_middleware(Results(backend=RedisBackend(url=f"unix://{SOCKET}")))
    _dramatiq.set_broker(_broker)

    @_dramatiq.actor(store_results=True)
    def dramatiq_task() -> int:
        """Do nothing."""
        return 0
elif NAME == "taskiq":
    from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend

    taskiq_broker = ListQueueBroker(f"unix://{SOCKET}").with_result_backend(RedisAsyncResultBackend(f"unix://{SOCKET}"))

    @taskiq_broker.task(task_name="empty")
    async def taskiq_task() -> None:
        """Do nothing."""
elif NAME == "arq":
    from arq.connections import RedisSettings

    async def arq_task(_: Any) -> None:
        """Do nothing."""

    class ArqWorker:
        """The settings of arq's worker."""

        functions = (arq_task,)
        redis_settings = RedisSettings(unix_socket_path=SOCKET)
        max_jobs = 64
        poll_delay = 0.01


def main() -> None:
    """Run the tasks, in a process in which the environment names the queue."""
    if NAME:
        print({"celery": celery, "dramatiq": dramatiq, "taskiq": taskiq, "arq": arq}[NAME](int(sys.argv[3])))
        return
    name, socket, num_tasks = sys.argv[1:]
    os.environ |= {"BENCH_TASK_QUEUE": name, "BENCH_REDIS_SOCKET": socket}
    os.execv(sys.executable, [sys.executable, __file__, name, socket, num_tasks])


if __name__ == "__main__":
    main()
