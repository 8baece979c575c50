"""The end of a task by `revoke(terminate=True)`: its jobs are canceled, in every pool of Celery.

Celery's own request kills the child process of the pool `prefork`, where the task's jobs then go on, and fails in the
pool `threads`, which cannot kill a thread. Here the task itself is told: by a signal of its child process, or by the
client that it waits for.
"""

from __future__ import annotations

import signal as signals
from typing import Any

from celery.concurrency.base import BasePool
from celery.platforms import signals as signals_by_name
from celery.worker.request import Request

SOFT_SIGNAL = "SIGUSR1"
"""The signal that raises SoftTimeLimitExceeded in a task of a child process."""


class TaskRequest(Request):  # type: ignore[misc]  # celery ships no types
    """A task of penstock as its worker holds it."""

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
