"""The Celery application. Redis is its broker and result backend, and JSON its only serializer."""

from __future__ import annotations

import logging
import sys
from typing import Any

from celery import Celery
from celery.app.log import Logging

from penstock.producer.batch.installation import QUEUE, STORED_BATCHES, add_to
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.worker_process import tell_service_manager
from penstock.runtime.logging import LogSettings, log_formatter
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
    url = celery_url(settings.broker_url or jobs_url)
    app = Celery("penstock", broker=url, backend=url, log=f"{WorkerLogging.__module__}:{WorkerLogging.__name__}")
    app.conf.update(_options(settings))
    # Tasks that users add to this app have leases too, because all its workers hold them.
    add_to(app, QUEUE, jobs_url, settings, leased=None)
    tell_service_manager()
    if settings.stored_batches:
        app.steps["worker"].add(STORED_BATCHES)
    return app


def celery_url(redis_url: str) -> str:
    """Return the URL with a Unix socket's scheme as Celery expects it."""
    return redis_url.replace("unix://", "redis+socket://", 1)


def _options(settings: CelerySettings) -> dict[str, Any]:
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
        },
        "result_backend_transport_options": {"global_keyprefix": KEY_PREFIX},
        # While Redis is away, a worker keeps a finished task until its result is stored.
        "result_backend_always_retry": True,
        "result_expires": settings.result_ttl_s,
    }
