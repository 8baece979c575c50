"""Running a batch in a Celery worker while following its progress from this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from celery.exceptions import CeleryError
from celery.result import AsyncResult
from celery.states import READY_STATES, RETRY, SUCCESS
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from penstock.contract.errors import PenstockError, UnavailableError
from penstock.producer.batch.celery_app import make_app
from penstock.producer.batch.records import Batch, BatchProgress
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.tasks import PROGRESS_STATE, RUN_FILE

POLL_INTERVAL_S = 0.2
"""Seconds between two reads of the task's state."""


class TaskFailedError(PenstockError):
    """A task ended with an error from outside of penstock."""

    code = "task_failed"


def run_in_worker(redis_url: str, batch: Batch, on_progress: Callable[[BatchProgress], None]) -> BatchProgress:
    """Send a batch to the workers and wait for its end. If this process stops, the batch continues in its worker.

    Raises the task's error, or UnavailableError if Celery's Redis is unreachable.
    """
    app = make_app(CelerySettings.load(), redis_url)
    try:
        return _follow(app.send_task(RUN_FILE, kwargs=asdict(batch)), on_progress)
    except (OperationalError, RedisError) as error:
        raise UnavailableError(f"Celery's Redis is unreachable: {error}", code="redis_away") from error


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
