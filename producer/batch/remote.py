"""A batch handed to a Celery worker, and its progress followed from here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from celery.exceptions import CeleryError
from celery.result import AsyncResult
from celery.states import RETRY, SUCCESS
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from penstock.contract.errors import PenstockError, UnavailableError
from penstock.producer.batch.celery_app import make_app
from penstock.producer.batch.records import Batch, Progress
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.batch.tasks import PROGRESS_STATE, RUN_FILE

POLL_INTERVAL_S = 0.2


class TaskFailedError(PenstockError):
    """A task ended with an error that is none of ours."""

    code = "task_failed"


def run_in_worker(redis_url: str, batch: Batch, on_progress: Callable[[Progress], None]) -> Progress:
    """Sends a batch to the workers and waits for its end; the batch goes on when nobody waits.

    Raises what the task raised, UnavailableError when Celery's Redis is away.
    """
    app = make_app(CelerySettings.load(), redis_url)
    try:
        return _follow(app.send_task(RUN_FILE, kwargs=asdict(batch)), on_progress)
    except (OperationalError, RedisError) as error:
        raise UnavailableError(f"Celery's Redis is away: {error}", code="redis_away") from error


def _follow(task: AsyncResult, on_progress: Callable[[Progress], None]) -> Progress:
    while not task.ready():
        state, said = task.state, task.info
        if state == PROGRESS_STATE:
            on_progress(Progress(**said))
        else:
            on_progress(Progress(0, waiting=str(said) if state == RETRY else "no worker has taken it yet"))
        time.sleep(POLL_INTERVAL_S)
    if task.state == SUCCESS:
        return Progress(**task.result)
    raise _error_of(task.result)


def _error_of(result: Any) -> PenstockError:
    if isinstance(result, PenstockError):
        return result
    kind = "" if isinstance(result, CeleryError) else f"{type(result).__name__}: "
    return TaskFailedError(f"the task failed: {kind}{result}")
