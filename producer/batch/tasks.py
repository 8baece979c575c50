"""Celery tasks: thin wrappers of `runner.py`. While the queue is full or unreachable, a task retries later.

A retry is a new message to Celery. If Celery's Redis cannot take it, the task retries without one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from celery import Celery, Task
from celery.exceptions import Reject

from penstock.contract.errors import BusyError, UnavailableError
from penstock.contract.job import Durability, checked_durability
from penstock.producer.batch.records import Batch, BatchProgress
from penstock.producer.batch.request import CHAT_URL, COMPLETIONS_URL, BatchRequest, request_of
from penstock.producer.batch.runner import OnSubmit, answer, run_batch
from penstock.producer.batch.task_traces import TaskTraces
from penstock.producer.batch.worker_metrics import WorkerMetrics
from penstock.producer.client import AsyncClient

_LOG = logging.getLogger(__package__)
GENERATE = "penstock.generate"
RUN_FILE = "penstock.run_file"
PROGRESS_STATE = "PROGRESS"
_REPORT_INTERVAL_S = 0.5

T = TypeVar("T")


class _RetryingTask(Task):  # type: ignore[misc]  # celery ships no types
    """A task that retries without limit and keeps its arguments and results out of the logs."""

    abstract = True
    # retry() uses this attribute if it is given None. Celery's default is 3.
    max_retries = None
    argsrepr_maxsize = 0
    kwargsrepr_maxsize = 0
    resultrepr_maxsize = 0


def add_tasks(app: Celery, redis_url: str, metrics: WorkerMetrics, *, longest_pause_s: float) -> None:
    """Register the tasks with a Celery app.

    `longest_pause_s` limits the pause between retries. It must be shorter than the broker's visibility timeout.
    """
    traces = TaskTraces()

    def run(task: Task, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        with traces.continued(task):
            return _run_with_retries(task, work, longest_pause_s)

    # Shared tasks would also be added to every other Celery app of the process.
    @app.task(name=GENERATE, bind=True, base=_RetryingTask, shared=False)  # type: ignore[untyped-decorator]
    def generate(
        self: Task,
        prompt: str | list[int] | None = None,
        messages: list[dict[str, Any]] | None = None,
        durability: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Answer one request and return OpenAI's response object.

        `durability`: what its submission waits for; by default the client's setting. `options` are `model` and the
        fields of an OpenAI body, such as the sampling options.
        """
        given = {"prompt": prompt, "messages": messages}
        body = {name: value for name, value in given.items() if value is not None} | options
        request = request_of(COMPLETIONS_URL if messages is None else CHAT_URL, body)
        key, level = f"task:{self.request.id}", checked_durability(durability)
        return run(self, lambda: _generate(redis_url, request, key, level, metrics.submitted))

    @app.task(name=RUN_FILE, bind=True, base=_RetryingTask, shared=False)  # type: ignore[untyped-decorator]
    def run_file(self: Task, input: str, output: str, **options: Any) -> dict[str, Any]:  # noqa: A002
        """Answer a file of requests and write a file of results. Paths are local to the worker.

        `options` are the other fields of `Batch`.
        """
        # Not update_state(): it works only on the task's own thread.
        backend, task_id = self.backend, self.request.id
        with (
            reporting(lambda p: backend.store_result(task_id, asdict(p), PROGRESS_STATE)) as report,
            metrics.counting(report) as counted,
        ):
            batch = Batch(input, output, **options)
            return asdict(run(self, lambda: run_batch(redis_url, batch, counted, metrics.submitted)))


def _run_with_retries(task: Task, work: Callable[[], Coroutine[Any, Any, T]], longest_pause_s: float) -> T:
    while True:
        try:
            return asyncio.run(work())
        except (BusyError, UnavailableError) as error:
            pause_s = min(error.retry_after_ms / 1000, longest_pause_s)
            _retry_later(task, error, pause_s)
        # Celery's Redis took no message. The worker keeps the task, so the task is not lost.
        time.sleep(pause_s)


def _retry_later(task: Task, error: BusyError | UnavailableError, pause_s: float) -> None:
    """Queue the task again and raise celery.exceptions.Retry. Return if Celery's Redis is full or unreachable."""
    # Celery recreates the error from its message alone, which does not suffice for a BusyError.
    shown = UnavailableError(error.message, code=error.code)
    try:
        raise task.retry(exc=shown, countdown=pause_s) from error
    except Reject as refused:
        # Celery would end the task as failed and remove it from the queue.
        _LOG.warning("task.retries_in_place", extra={"task_id": task.request.id, "reason": str(refused.reason)})


async def _generate(
    redis_url: str, request: BatchRequest, key: str, durability: Durability | None, on_submit: OnSubmit
) -> dict[str, Any]:
    async with AsyncClient(redis_url) as client:
        return (await answer(client, request, None, key, durability=durability, on_submit=on_submit))[1]


@contextmanager
def reporting(store: Callable[[BatchProgress], None]) -> Iterator[Callable[[BatchProgress], None]]:
    """Yield a function that reports progress through `store`, at most every 0.5 s.

    The function drops intermediate reports, and it neither waits for `store` nor fails with it. The end of the block
    waits for the last report, so that none follows the result that the task itself stores.
    """
    next_s = 0.0
    in_progress: Future[None] | None = None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-progress") as thread:

        def report(progress: BatchProgress) -> None:
            nonlocal next_s, in_progress
            if time.monotonic() >= next_s and (in_progress is None or in_progress.done()):
                next_s = time.monotonic() + _REPORT_INTERVAL_S
                in_progress = thread.submit(store, progress)

        yield report
