"""Celery's tasks: thin doors to `runner.py`. While the queue is full or away they come back later, and do not fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from celery import Celery, Task

from penstock.contract.errors import BusyError, UnavailableError
from penstock.producer.batch.records import Batch, BatchProgress
from penstock.producer.batch.request import CHAT_URL, COMPLETIONS_URL, Request, request_of
from penstock.producer.batch.runner import answer, run_batch
from penstock.producer.client import AsyncClient

GENERATE = "penstock.generate"
RUN_FILE = "penstock.run_file"
PROGRESS_STATE = "PROGRESS"
_REPORT_INTERVAL_S = 0.5

T = TypeVar("T")


class _Patient(Task):  # type: ignore[misc]  # celery ships no types
    """A task that comes back as often as it must, and whose arguments and results never stand in a log."""

    abstract = True
    # None given to retry() would mean this attribute, which is 3 by default.
    max_retries = None
    argsrepr_maxsize = 0
    kwargsrepr_maxsize = 0
    resultrepr_maxsize = 0


def add_tasks(app: Celery, redis_url: str, *, longest_pause_s: float) -> None:
    """Registers our tasks; a pause between attempts must stay below the broker's visibility timeout."""

    def run(task: Task, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run(work)
        except (BusyError, UnavailableError) as error:
            pause_s = min(error.retry_after_ms / 1000, longest_pause_s)
            # Celery makes the error anew from its message alone, which a BusyError cannot be.
            shown = UnavailableError(error.message, code=error.code)
            raise task.retry(exc=shown, countdown=pause_s) from error

    # Shared ones would be added to every other Celery app of the process too.
    @app.task(name=GENERATE, bind=True, base=_Patient, shared=False)  # type: ignore[untyped-decorator]
    def generate(
        self: Task, prompt: str | list[int] | None = None, messages: list[dict[str, Any]] | None = None, **options: Any
    ) -> dict[str, Any]:
        """One answer, as OpenAI's response object. Options are `model` and those of SamplingParams."""
        given = {"prompt": prompt, "messages": messages}
        body = {name: value for name, value in given.items() if value is not None} | options
        request = request_of(COMPLETIONS_URL if messages is None else CHAT_URL, body)
        return run(self, _generate(redis_url, request, key=f"task:{self.request.id}"))

    @app.task(name=RUN_FILE, bind=True, base=_Patient, shared=False)  # type: ignore[untyped-decorator]
    def run_file(self: Task, input: str, output: str, **options: Any) -> dict[str, Any]:  # noqa: A002
        """Turns a file of requests into a file of results; paths are the worker's. Options are those of `Batch`."""
        # Not update_state, which asks the calling thread for the task.
        backend, task_id = self.backend, self.request.id
        with reporting(lambda p: backend.store_result(task_id, asdict(p), PROGRESS_STATE)) as report:
            return asdict(run(self, run_batch(redis_url, Batch(input, output, **options), report)))


async def _generate(redis_url: str, request: Request, *, key: str) -> dict[str, Any]:
    async with AsyncClient(redis_url) as client:
        return (await answer(client, request, None, key))[1]


@contextmanager
def reporting(store: Callable[[BatchProgress], None]) -> Iterator[Callable[[BatchProgress], None]]:
    """A function that passes on the progress of a moment, not of every row, and neither waits for `store` nor fails
    with it. The block's end waits, so that no report comes behind what the task itself stores.
    """
    next_s = 0.0
    under_way: Future[None] | None = None
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-progress") as thread:

        def report(progress: BatchProgress) -> None:
            nonlocal next_s, under_way
            if time.monotonic() >= next_s and (under_way is None or under_way.done()):
                next_s = time.monotonic() + _REPORT_INTERVAL_S
                under_way = thread.submit(store, progress)

        yield report
