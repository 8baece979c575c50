"""A task as its worker holds it: how it ends by `revoke(terminate=True)`, and when its next attempt is due.

Its jobs are canceled by `revoke(terminate=True)` in every pool of Celery.

Celery's own request kills the child process of the pool `prefork`, where the task's jobs then go on, and fails in the
pool `threads`, which cannot kill a thread. Here the task itself is told: by a signal of its child process, or by the
client that it waits for.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from celery import Task
from celery.concurrency.base import BasePool
from celery.platforms import signals as signals_by_name
from celery.worker.request import Request

SOFT_SIGNAL = "SIGUSR1"
"""The signal that raises SoftTimeLimitExceeded in a task of a child process."""


_BY_REDIS, _OFFSET_S = "penstock_eta_by_redis", "penstock_clock_offset_s"
"""Of a message: its time is Redis's. Of a request: by how much that clock is ahead, as its worker knows."""


def due_after(task: Task, pause_s: float) -> Mapping[str, Any]:
    """Return the options of a further attempt of `task`. Its time is Redis's, as another worker may make it."""
    headers = {**(task.request.headers or {}), _BY_REDIS: True}
    return {"countdown": pause_s + (task.request.get(_OFFSET_S) or 0.0), "headers": headers}


class TaskRequest(Request):  # type: ignore[misc]  # celery ships no types
    """A task of penstock as its worker holds it."""

    @property
    def eta(self) -> datetime | None:
        """When the task is due, by the clock of this machine."""
        eta: datetime | None = super().eta
        request = self.request_dict
        return eta if eta is None or _BY_REDIS not in request else eta - timedelta(seconds=request[_OFFSET_S])

    @property
    def request_dict(self) -> dict[str, Any]:
        """What the process that runs the task is told of it."""
        told: dict[str, Any] = super().request_dict
        told[_OFFSET_S] = self.task.worker_client.clock.offset_s
        return told

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """End the task and cancel its jobs. Another signal than TERM kills a child process, as Celery does."""
        if not self.time_start:
            super().terminate(pool, signal)  # Celery calls this method again when the task has begun.
            return
        number = signals_by_name.signum(signal or "TERM")
        if getattr(pool.terminate_job, "__func__", None) is not BasePool.terminate_job:
            super().terminate(pool, SOFT_SIGNAL if number == signals.SIGTERM else signal)
            return
        self.task.worker_client.terminate(self.id)
        self._announce_revoked("terminated", True, number, False)
