"""The Celery application, and a batch that runs in one of its workers while this process follows its progress.

Redis is its broker and result backend, and JSON its only serializer.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from celery import Celery
from celery.app.log import Logging
from celery.exceptions import CeleryError
from celery.result import AsyncResult
from celery.states import READY_STATES, RETRY, SUCCESS
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from penstock.contract.errors import PenstockError, UnavailableError
from penstock.producer.batch.installation import QUEUE, STORED_BATCHES, add_to
from penstock.producer.batch.records import Batch, BatchProgress
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.tasks import PROGRESS_STATE, RUN_FILE
from penstock.producer.batch.worker_process import tell_service_manager
from penstock.queue.broker.connection import connect, translated
from penstock.queue.broker.redis_clock import RedisClock
from penstock.runtime.logging import LogSettings, log_formatter
from penstock.runtime.redis_url import sentinel_url_of
from penstock.runtime.settings import redis_url_of

KEY_PREFIX = "penstock:celery:"
"""Prefix of all of Celery's Redis keys. Keys of the job queue have braces after `penstock:`, so none collide."""
_MAX_RESTORE_CHECK_S = 5
"""Most seconds between two checks for unacknowledged tasks past their visibility timeout."""


class WorkerLogging(Logging):  # type: ignore[misc]
    """Celery's setup of a worker's loggers, with penstock's formats. The level is Celery's own `--loglevel`."""

    def setup_handlers(self, logger: logging.Logger, *args: Any, **kwargs: Any) -> logging.Logger:
        """Add a handler to `logger` as Celery does, and give it penstock's format."""
        super().setup_handlers(logger, *args, **kwargs)
        formatter = log_formatter(LogSettings.load(), sys.stderr)
        for handler in logger.handlers:
            handler.setFormatter(formatter)
            handler.addFilter(_without_contents)
        return logger


def _without_contents(record: logging.LogRecord) -> bool:
    """Remove what Celery adds to a task's events: its arguments and its result, which are prompts and completions."""
    vars(record).pop("data", None)
    return True


def make_app(settings: CelerySettings, redis_url: str | None = None) -> Celery:
    """Return a Celery application with the batch tasks.

    `redis_url` is the Redis of the job queue; by default it is found as `redis_url_of` does.
    """
    jobs_url = redis_url_of(redis_url)
    url, of_transport, of_app = celery_places(settings.broker_url or jobs_url)
    app = Celery("penstock", broker=url, backend=url, log=f"{WorkerLogging.__module__}:{WorkerLogging.__name__}")
    app.conf.update(_options(settings, of_transport) | of_app)
    # Tasks that users add to this app have leases too, because all its workers hold them.
    add_to(app, QUEUE, jobs_url, settings, leased=None)
    tell_service_manager()
    if settings.stored_batches:
        app.steps["worker"].add(STORED_BATCHES)
    return app


def celery_url(redis_url: str) -> str:
    """Return the URL with a Unix socket's scheme as Celery expects it."""
    return redis_url.replace("unix://", "redis+socket://", 1)


def celery_places(redis_url: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the URL as Celery expects it, transport options, and options of the app that go with it.

    They are those of broker and result backend. Celery writes Sentinels and TLS in its own way.
    """
    if (behind_sentinel := sentinel_url_of(redis_url)) is None:
        return celery_url(redis_url), {}, {}
    url, of_transport = behind_sentinel.for_celery
    if not behind_sentinel.has_tls:
        return url, of_transport, {}
    tls = {name: value for name, value in behind_sentinel.server.items() if name.startswith("ssl_")}
    tls.setdefault("ssl_cert_reqs", "required")
    return url, of_transport, {"broker_use_ssl": tls, "redis_backend_use_ssl": tls}


def _options(settings: CelerySettings, of_transport: dict[str, Any]) -> dict[str, Any]:
    return {
        "task_default_queue": QUEUE,
        "task_serializer": "json",
        "result_serializer": "json",
        "event_serializer": "json",
        "accept_content": ["json"],
        "result_accept_content": ["json"],
        # Remove a task from the queue when it is done, not when a worker takes it.
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "worker_prefetch_multiplier": 1,
        # If Redis is briefly unreachable, the task continues. A copy at another worker finds the output locked.
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_soft_shutdown_timeout": settings.soft_shutdown_s,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_transport_options": {
            "visibility_timeout": settings.visibility_timeout_s,
            "global_keyprefix": KEY_PREFIX,
            "unacked_restore_interval": min(_MAX_RESTORE_CHECK_S, settings.visibility_timeout_s),
            "unacked_restore_throttle": 1,
            **of_transport,
        },
        "result_backend_transport_options": {"global_keyprefix": KEY_PREFIX, **of_transport},
        # While Redis is away, a worker keeps a finished task until its result is stored.
        "result_backend_always_retry": True,
        "result_expires": settings.result_ttl_s,
    }


POLL_INTERVAL_S = 0.2
"""Seconds between two reads of the task's state."""


class TaskFailedError(PenstockError):
    """A task ended with an error from outside of penstock."""

    code = "task_failed"


def run_in_worker(redis_url: str, batch: Batch, on_progress: Callable[[BatchProgress], None]) -> BatchProgress:
    """Send a batch to the workers and wait for its end. If this process stops, the batch continues in its worker.

    Its times go by the clock of Redis, because a worker's machine has another one than this one.

    Raises the task's error, or UnavailableError if Celery's Redis is unreachable.
    """
    app = make_app(CelerySettings.load(), redis_url)
    if batch.not_before_s is not None:
        batch = batch.timed_by(asyncio.run(_ask_offset(redis_url)))
    try:
        return _follow(app.send_task(RUN_FILE, kwargs=asdict(batch)), on_progress)
    except (OperationalError, RedisError) as error:
        raise UnavailableError(f"Celery's Redis is unreachable: {error}", code="redis_away") from error


async def _ask_offset(redis_url: str) -> float:
    clock = RedisClock()
    async with connect(redis_url) as redis:
        with translated():
            await clock.ask(redis)
    return clock.offset_s


def _follow(task: AsyncResult, on_progress: Callable[[BatchProgress], None]) -> BatchProgress:
    # Read state and result in one call, because the task may advance between two calls.
    while (now := task.backend.get_task_meta(task.id))["status"] not in READY_STATES:
        if now["status"] == PROGRESS_STATE:
            on_progress(BatchProgress(**now["result"]))
        else:
            waiting = str(now["result"]) if now["status"] == RETRY else "no worker has taken it yet"
            on_progress(BatchProgress(0, waiting=waiting))
        time.sleep(POLL_INTERVAL_S)
    if now["status"] == SUCCESS:
        return BatchProgress(**now["result"])
    raise _error_of(now["result"])


def _error_of(result: Any) -> PenstockError:
    if isinstance(result, PenstockError):
        return result
    kind = "" if isinstance(result, CeleryError) else f"{type(result).__name__}: "
    return TaskFailedError(f"the task failed: {kind}{result}")
