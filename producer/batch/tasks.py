"""Celery tasks: thin wrappers of `runner.py`. While the queue is full or unreachable, a task retries later.

A retry is a new message to Celery. If Celery's Redis cannot take it, the task retries without one.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar, Unpack

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from penstock.contract.durability import checked_durability
from penstock.contract.errors import BusyError, PenstockError, RequestError, UnavailableError
from penstock.contract.job import SubmitOptions
from penstock.producer.batch.answer import answer
from penstock.producer.batch.endpoints import CHAT_URL, COMPLETIONS_URL
from penstock.producer.batch.records import Batch, BatchProgress, RowTerms
from penstock.producer.batch.request import request_of
from penstock.producer.batch.runner import answer_rows, opened
from penstock.producer.batch.task_request import due_after
from penstock.producer.batch.user_app import SERIALIZER, check_formats, declared_queue
from penstock.producer.batch.worker_metrics import WorkerMetrics
from penstock.producer.batch.worker_process import TaskTerminatedError, TaskTraces, WorkerClient
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.producer.client.request import Prompt
from penstock.producer.flows.marks import answer_text, replaced
from penstock.queue.broker.connection import translated
from penstock.queue.broker.producer import ServedPool

_LOG = logging.getLogger(__package__)
GENERATE = "penstock.generate"
GENERATE_FROM = "penstock.generate_from"
RUN_FILE = "penstock.run_file"
TASKS = frozenset({GENERATE, GENERATE_FROM, RUN_FILE})
PREVIOUS = "{previous}"
"""Stands for the result of the previous task in a prompt or a message of `GENERATE_FROM`."""
_PREVIOUS = re.compile(re.escape(PREVIOUS))
PROGRESS_STATE = "PROGRESS"
_REPORT_INTERVAL_S = 0.5
CANCELED_AT_ONCE = 64
_DEFAULT_VISIBILITY_TIMEOUT_S = 3600
"""kombu's default for Redis."""

T = TypeVar("T")


class _RetryingTask(Task):  # type: ignore[misc]  # celery ships no types
    """A task that retries without limit and keeps its arguments and results out of the logs."""

    abstract = True
    # retry() uses this attribute if it is given None. Celery's default is 3.
    max_retries = None
    argsrepr_maxsize = 0
    kwargsrepr_maxsize = 0
    resultrepr_maxsize = 0
    serializer = SERIALIZER
    # An app's `task_ignore_result` would throw the answers away. A call may still say `ignore_result=True`.
    ignore_result = False
    # Remove a task from the queue when it is done, not when a worker takes it. A second run of it changes nothing.
    acks_late = True
    reject_on_worker_lost = True
    destination: str
    """The queue to which the task is sent. Celery's own attribute for it will be removed in version 6."""
    worker_client: WorkerClient
    Request = "penstock.producer.batch.task_request:TaskRequest"

    def _get_exec_options(self) -> dict[str, Any]:
        """Return the options of each call. Celery asks for them when a task is sent, and the settings are final."""
        check_formats(self.app)
        queue = declared_queue(self.app, self.destination)
        options = {**super()._get_exec_options(), "queue": self.destination}
        # Else the exchange of a route for all tasks (`task_routes`) would take them, which may have no queue.
        if queue.exchange.type == "direct":
            return {**options, "exchange": ""}
        return {**options, "exchange": queue.exchange.name, "routing_key": queue.routing_key}


class _Worker:
    """What the tasks of a process share: the client, the traces and the metrics."""

    def __init__(self, client: WorkerClient, metrics: WorkerMetrics) -> None:
        self._client = client
        self._metrics = metrics
        self._traces = TaskTraces()

    def generate(self, task: Task, body: Mapping[str, Any], durability: str | None) -> dict[str, Any]:
        """Return OpenAI's response object for a body."""
        request = request_of(COMPLETIONS_URL if body.get("messages") is None else CHAT_URL, body)
        terms = RowTerms(durability=checked_durability(durability))
        # A task that Celery delivers again finds its job by this key.
        key = f"task:{task.request.id}"

        async def ask(client: AsyncClient) -> dict[str, Any]:
            noting = NotingSubmitter(client, job_ids)
            _, answered = await answer(noting, request, key, terms, on_submit=lambda _: self._metrics.submitted())
            return answered

        job_ids = list[str]()
        return self._run(task, lambda: self._client.run(ask, task.request.id), job_ids)

    def run_file(self, task: Task, batch: Batch) -> BatchProgress:
        """Answer a file of requests while the task shows its progress."""
        # Not update_state(): it works only on the task's own thread.
        backend, task_id, job_ids = task.backend, task.request.id, list[str]()
        with (
            reporting(lambda p: backend.store_result(task_id, asdict(p), PROGRESS_STATE)) as report,
            self._metrics.counting(report) as counted,
        ):

            def answer_file() -> BatchProgress:
                with opened(batch, lambda reason: report(BatchProgress(0, waiting=reason))) as one:

                    async def answer_here(client: AsyncClient) -> BatchProgress:
                        here = one
                        if batch.not_before_s is not None:
                            # It goes by the clock of Redis, and this machine may have another time.
                            clock = client.servers.clock
                            with translated():
                                await clock.ask(client.servers.directory.redis)
                            here = replace(one, batch=one.batch.timed_by(-clock.offset_s))
                        noting = NotingSubmitter(client, job_ids)
                        return await answer_rows(noting, here, counted, on_submit=self._metrics.submitted)

                    return self._client.run(answer_here, task_id)

            return self._run(task, answer_file, job_ids)

    def _run(self, task: Task, work: Callable[[], T], job_ids: list[str]) -> T:
        """Do the work of a task. If Celery ends the task, `job_ids` are canceled, which the work has submitted."""
        with self._traces.continued(task):
            try:
                return _run_with_retries(task, work)
            except (TaskTerminatedError, SoftTimeLimitExceeded) as error:
                if isinstance(error, SoftTimeLimitExceeded) and _has_soft_limit(task):
                    raise
                with suppress(PenstockError):
                    self._client.run(lambda client: cancel_jobs(client, job_ids))
                _LOG.info("task.terminated", extra={"task_id": task.request.id, "num_jobs": len(job_ids)})
        # Its worker has stored that it was revoked.
        raise Ignore


class NotingSubmitter:
    """A client that notes the jobs of one task, so that they can be canceled with it."""

    def __init__(self, client: AsyncClient, job_ids: list[str]) -> None:
        self._client = client
        self._job_ids = job_ids

    async def submit(self, prompt: Prompt, /, **options: Unpack[SubmitOptions]) -> AsyncJob:
        """Submit a job; see `AsyncClient.submit`."""
        job = await self._client.submit(prompt, **options)
        self._job_ids.append(job.id)
        return job

    async def ack(self, *job_ids: str) -> int:
        """Free the results of jobs whose rows are stored; see `AsyncClient.ack`."""
        return await self._client.ack(*job_ids)

    async def pools(self) -> Mapping[str, ServedPool]:
        """Return the served pools; see `AsyncClient.pools`."""
        return await self._client.pools()


async def cancel_jobs(client: AsyncClient, job_ids: Sequence[str]) -> None:
    """Cancel those of the jobs that have not ended."""
    for at in range(0, len(job_ids), CANCELED_AT_ONCE):
        part = job_ids[at : at + CANCELED_AT_ONCE]
        await asyncio.gather(*(client.cancel(job_id) for job_id in part), return_exceptions=True)


def _has_soft_limit(task: Task) -> bool:
    """Return whether a soft time limit may have ended the task. Else its worker did, on behalf of `revoke`."""
    _, soft_s = task.request.timelimit or (None, None)
    return bool(soft_s or task.soft_time_limit or task.app.conf.task_soft_time_limit)


def add_tasks(app: Celery, client: WorkerClient, metrics: WorkerMetrics, *, queue: str) -> None:
    """Register the tasks with a Celery app. They are sent to `queue`."""
    worker = _Worker(client, metrics)
    # Shared tasks would also be added to every other Celery app of the process.
    registered = partial(app.task, bind=True, base=_RetryingTask, shared=False, destination=queue, worker_client=client)

    @registered(name=GENERATE)  # type: ignore[untyped-decorator]
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
        return worker.generate(self, _body_of(prompt, messages, options), durability)

    @registered(name=GENERATE_FROM)  # type: ignore[untyped-decorator]
    def generate_from(
        self: Task,
        previous: Any,
        prompt: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        durability: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Answer one request whose prompt or messages contain the result of the previous task, as `{previous}`."""
        return worker.generate(self, filled_from(_body_of(prompt, messages, options), text_of(previous)), durability)

    @registered(name=RUN_FILE)  # type: ignore[untyped-decorator]
    def run_file(self: Task, input: str, output: str, **options: Any) -> dict[str, Any]:  # noqa: A002
        """Answer a file of requests and write a file of results. Paths are local to the worker.

        `options` are the other fields of `Batch`.
        """
        return asdict(worker.run_file(self, Batch(input, output, **options)))


def text_of(result: Any) -> str:
    """Return the text of a task's result: a response object, a text, or a list of them, joined by blank lines.

    Raises RequestError for another result.
    """
    if isinstance(result, str):
        return result
    if isinstance(result, list):
        return "\n\n".join(map(text_of, result))
    if (text := answer_text(result)) is None:
        message = f"{PREVIOUS}: the previous task's result must be a text, a response with text, or a list of them"
        raise RequestError(message, param="previous")
    return text


def _body_of(
    prompt: str | list[int] | None, messages: list[dict[str, Any]] | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    given = {"prompt": prompt, "messages": messages}
    return {name: value for name, value in given.items() if value is not None} | {**options}


def filled_from(body: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the body with `text` in place of PREVIOUS. Raises RequestError if PREVIOUS occurs nowhere."""
    places = list[None]()

    def text_for(_: re.Match[str]) -> str:
        places.append(None)
        return text

    filled = replaced(body, _PREVIOUS, text_for)
    if not places:
        param = "messages" if "messages" in body else "prompt"
        raise RequestError(f"{param} must contain {PREVIOUS}, the text of the previous task", param=param)
    return filled


def _run_with_retries(task: Task, work: Callable[[], T]) -> T:
    options = task.app.conf.broker_transport_options
    # A message that waits for longer than the visibility timeout would be delivered twice.
    longest_pause_s = options.get("visibility_timeout", _DEFAULT_VISIBILITY_TIMEOUT_S) / 2
    while True:
        try:
            return work()
        except (BusyError, UnavailableError) as error:
            if task.request.is_eager:
                # It runs in its caller's process (`task_always_eager`), where Celery would retry without a pause.
                raise
            pause_s = min(error.retry_after_ms / 1000, longest_pause_s)
            _retry_later(task, error, pause_s)
        # Celery's Redis took no message. The worker keeps the task, so the task is not lost.
        time.sleep(pause_s)


def _retry_later(task: Task, error: BusyError | UnavailableError, pause_s: float) -> None:
    """Queue the task again and raise celery.exceptions.Retry. Return if Celery's Redis is full or unreachable."""
    # Celery recreates the error from its message alone, which does not suffice for a BusyError.
    shown = UnavailableError(error.message, code=error.code)
    try:
        raise task.retry(exc=shown, **due_after(task, pause_s)) from error
    except Reject as refused:
        # Celery would end the task as failed and remove it from the queue.
        _LOG.warning("task.retries_in_place", extra={"task_id": task.request.id, "reason": str(refused.reason)})


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
