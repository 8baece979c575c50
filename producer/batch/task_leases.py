"""Leases on Celery tasks: each worker renews the tasks that it holds, and queues the tasks of a dead worker again.

Celery's Redis transport keeps a taken task in `unacked` and its start time in `unacked_index`. After the visibility
timeout it gives the task to another worker, so the timeout must exceed the time of most tasks.

Here a worker writes the time again and again while it lives. If another worker sees the same time for a whole lease,
measured by its own clock, the task's worker is dead. So clocks of two machines are never compared, and a long task
keeps its lease.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from celery import bootsteps
from celery.worker.consumer.tasks import Tasks
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

_LOG = logging.getLogger(__package__)

RENEWALS_PER_LEASE = 5
MAX_TASKS_LOOKED_AT = 10_000
_STOP_TIMEOUT_S = 5.0


class LeaseObserver:
    """Finds the tasks that no worker renews."""

    def __init__(self, lease_s: float, *, max_gap_s: float, now_s: float) -> None:
        """`max_gap_s`: all leases restart after a longer pause between checks, because Redis or this process hung."""
        self._lease_s = lease_s
        self._max_gap_s = max_gap_s
        self._looked_s = now_s
        self._seen: dict[str, tuple[float, float]] = {}
        """For each task: its last renewal, and when this observer first saw that renewal."""

    def silent(self, renewals: Mapping[str, float], now_s: float) -> list[str]:
        """Return the tasks with an expired lease. `renewals` holds the last renewal time of each task."""
        if now_s - self._looked_s > self._max_gap_s:
            self._seen.clear()
        self._looked_s = now_s
        before = self._seen
        self._seen = {
            tag: before[tag] if tag in before and before[tag][0] == renewed else (renewed, now_s)
            for tag, renewed in renewals.items()
        }
        return [tag for tag, (_, first_s) in self._seen.items() if now_s - first_s >= self._lease_s]


class TaskLeases(bootsteps.StartStopStep):  # type: ignore[misc]  # celery ships no types
    """A Celery boot step with a thread that renews this worker's leases and checks those of other workers.

    It works with every kind of Celery worker pool.
    """

    requires = (Tasks,)

    def __init__(self, consumer: Any, **_: Any) -> None:
        super().__init__(consumer)
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self, consumer: Any) -> None:
        """Start the thread. Celery calls this for each new connection of the worker."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_keep, args=(consumer, self._stopped), name="penstock-task-leases", daemon=True
        )
        self._thread.start()

    def stop(self, _: Any) -> None:
        """Stop the thread before Celery returns unfinished tasks to the queue."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)


def _keep(consumer: Any, stopped: threading.Event) -> None:
    lease_s = consumer.app.conf.penstock_task_lease_s
    pause_s = lease_s / RENEWALS_PER_LEASE
    observer = LeaseObserver(lease_s, max_gap_s=lease_s / 2, now_s=time.monotonic())
    with consumer.app.connection_for_read() as connection:
        while not stopped.wait(pause_s):
            try:
                channel = connection.default_channel
                _renew(channel, consumer.task_consumer.channel.qos)
                _give_back_silent(channel, observer)
            except (OperationalError, RedisError, OSError) as error:
                _LOG.info("task leases cannot be renewed while redis is unreachable", extra={"reason": str(error)})
                connection.collapse()
            except Exception:
                # Without this thread, other workers would run this worker's tasks a second time.
                _LOG.exception("task leases were not renewed")
                connection.collapse()


def _renew(channel: Any, qos: Any) -> None:
    now_s = time.time()
    # Copied, because other threads change it. kombu has no public API for the tasks that a worker holds.
    held = dict.fromkeys(qos._delivered.copy(), now_s)
    if held:
        with channel.conn_or_acquire() as client:
            # Update only existing members: a task may end at this moment.
            client.zadd(channel.unacked_index_key, held, xx=True)


def _give_back_silent(channel: Any, observer: LeaseObserver) -> None:
    with channel.conn_or_acquire() as client:
        rows = client.zrange(channel.unacked_index_key, 0, MAX_TASKS_LOOKED_AT - 1, withscores=True)
    renewals = {tag.decode() if isinstance(tag, bytes) else tag: renewed for tag, renewed in rows}
    for tag in observer.silent(renewals, time.monotonic()):
        channel.qos.restore_by_tag(tag)
        _LOG.warning("a task's worker is dead; the task is queued again", extra={"delivery_tag": tag})
