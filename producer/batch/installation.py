"""penstock's tasks in a Celery app: how they get there, and signatures of them for chains, groups and chords."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from celery import Celery, bootsteps, signals
from celery.canvas import Signature

from penstock.contract.errors import ConflictError
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.task_leases import leases_step
from penstock.producer.batch.tasks import GENERATE, GENERATE_FROM, RUN_FILE, TASKS, add_tasks
from penstock.producer.batch.user_app import check_formats, check_visibility_timeout, declared_queue
from penstock.producer.batch.worker_metrics import WorkerMetrics, metrics_step
from penstock.producer.batch.worker_process import WorkerClient, carry_trace
from penstock.runtime.settings import redis_url_of

_LOG = logging.getLogger(__package__)
QUEUE = "penstock-batch"
STORED_BATCHES = "penstock.producer.stored_batches.worker:RunsBatches"
"""Celery's name for the step with which a worker runs stored batches. Only workers import it."""
_INSTALLED = "penstock_tasks"
"""The attribute of an app that holds its tasks."""


class PenstockTasks:
    """The tasks of penstock in one Celery app. Each method returns a signature: a call that Celery can make later.

    `signature.delay()` sends it, and `chain`, `group` and `chord` combine it with any other task of the app.
    """

    def __init__(self, app: Celery, queue: str, redis_url: str | None, metrics: WorkerMetrics) -> None:
        self.metrics = metrics
        self.app = app
        self.queue = queue
        self.redis_url = redis_url

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Signature:
        """Answer a prompt or a chat. The result is OpenAI's response object.

        `options` are `model`, `durability`, and the fields of an OpenAI body. In a chain the signature takes no result
        of the task before it; `generate_from` does.
        """
        return self._signature(GENERATE, {"prompt": prompt, "messages": messages, **options}, immutable=True)

    def generate_from(
        self, prompt: str | None = None, *, messages: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> Signature:
        """Answer a prompt or a chat that contains the text of the task before it, in place of `{previous}`.

        The text is that of a response object, a text that another task returned, or those of a whole group, joined by
        blank lines.
        """
        return self._signature(GENERATE_FROM, {"prompt": prompt, "messages": messages, **options}, immutable=False)

    def run_file(self, input: str, output: str, **options: Any) -> Signature:  # noqa: A002
        """Answer a file of requests. Paths are those of the worker. `options` are the other fields of `Batch`."""
        return self._signature(RUN_FILE, {"input": input, "output": output, **options}, immutable=True)

    def _signature(self, name: str, fields: Mapping[str, Any], *, immutable: bool) -> Signature:
        given = {field: value for field, value in fields.items() if value is not None}
        return self.app.signature(name, kwargs=given, immutable=immutable)


def tasks_of(app: Celery) -> PenstockTasks | None:
    """Return penstock's tasks of an app; None if it has none."""
    installed: PenstockTasks | None = getattr(app, _INSTALLED, None)
    return installed


def install(
    app: Celery,
    *,
    redis_url: str | None = None,
    queue: str = QUEUE,
    stored_batches: bool = False,
    settings: CelerySettings | None = None,
) -> PenstockTasks:
    """Add penstock's tasks to a Celery app, and return them. A second call returns the same tasks.

    The tasks go to the queue `queue` of the app's own broker. Workers of the app take from it beside their other
    queues, unless `-Q` names their queues. No setting of the app changes. `redis_url` is the Redis of the job queue,
    which only workers need; by default it is found as clients find it. With `stored_batches`, workers of the app that
    have PENSTOCK_FILES_URL also run the batches of `/v1/batches` and `/v1/messages/batches`. Of `settings`,
    `task_lease_s`, `stored_batches` and those of the metrics apply. Raises ConflictError if the tasks are installed
    with another queue or Redis, and ConfigError if the app would lose tasks or results. Settings that follow later
    are checked when a task is sent, and when a worker starts.
    """
    settings = settings or CelerySettings.load()
    check_formats(app)
    if stored_batches and settings.stored_batches:
        app.steps["worker"].add(STORED_BATCHES)
    if (installed := tasks_of(app)) is not None:
        if installed.queue != queue or redis_url not in (None, installed.redis_url):
            raise ConflictError("this Celery app has penstock's tasks with another queue or redis_url", param="queue")
        return installed
    app.steps["worker"].add(_taking_step(queue, settings.task_lease_s))
    signals.celeryd_init.connect(partial(_declare, app, queue), weak=False)
    return add_to(app, queue, redis_url, settings, leased=TASKS)


def add_to(
    app: Celery, queue: str, redis_url: str | None, settings: CelerySettings, *, leased: Collection[str] | None
) -> PenstockTasks:
    """Add the tasks to an app whose workers take from `queue`. `leased`: tasks whose workers hold leases; None: all."""
    metrics = WorkerMetrics()
    tasks = PenstockTasks(app, queue, redis_url, metrics)
    setattr(app, _INSTALLED, tasks)
    client = WorkerClient(lambda: redis_url_of(redis_url))
    app.steps["consumer"].add(leases_step(settings.task_lease_s, leased, client.clock))
    if settings.metrics_port is not None:
        app.steps["worker"].add(metrics_step(metrics, settings.metrics_port, settings.metrics_host, queue))
    for name in TASKS:
        signals.before_task_publish.connect(carry_trace, sender=name)
    add_tasks(app, client, metrics, queue=queue)
    return tasks


def _declare(app: Celery, queue: str, instance: Any, **_: Any) -> None:
    """Declare the queue in a worker before it reads `-Q`."""
    if instance.app is app:
        declared_queue(app, queue)


def _taking_step(queue: str, lease_s: float) -> type[bootsteps.Step]:
    class TakesFromQueue(bootsteps.Step):  # type: ignore[misc]  # celery ships no types
        """Lets a worker take from penstock's queue too, if its command line names no queues."""

        def create(self, worker: Any) -> None:
            """Choose the queues of a worker before it connects."""
            queues = worker.app.amqp.queues
            if queues._consume_from is None:
                queues.select_add(queue)
            elif queue not in queues.consume_from:
                message = "this worker takes no tasks of penstock, because -Q does not name their queue"
                _LOG.info(message, extra={"queue": queue})
                return
            check_formats(worker.app)
            check_visibility_timeout(worker.app, lease_s)

    return TakesFromQueue
