"""Leases of Celery's tasks: a worker renews those that it holds, and puts those of a dead worker back into the queue.

Celery's Redis transport keeps a taken task in `unacked`, and the time when it was taken in `unacked_index`. It gives
the task to another worker when that time is older than the visibility timeout, which must be longer than most tasks
take. Here a worker writes that time again and again while it lives. Where another worker sees the same time for a
lease, by its own clock, the task's worker is dead. So no two clocks are compared, and a long task keeps its lease.
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

_LOG = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 5
MAX_TASKS_LOOKED_AT = 10_000
_STOP_TIMEOUT_S = 5.0


class LeaseObserver:
    """Finds the tasks whose lease nobody renews any more."""

    def __init__(self, lease_s: float, *, max_gap_s: float, now_s: float) -> None:
        """After a gap of `max_gap_s` between two looks every lease begins anew: Redis or this process stood still."""
        self._lease_s = lease_s
        self._max_gap_s = max_gap_s
        self._looked_s = now_s
        self._seen: dict[str, tuple[float, float]] = {}
        """Task → its last renewal, and when that was first seen."""

    def silent(self, renewals: Mapping[str, float], now_s: float) -> list[str]:
        """The tasks whose last renewal has been the same for a lease."""
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
    """A worker's thread that renews its leases and looks at those of the others. It works beside any kind of pool."""

    requires = (Tasks,)

    def __init__(self, consumer: Any, **_: Any) -> None:
        super().__init__(consumer)
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self, consumer: Any) -> None:
        """Begins with each connection of the worker."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_keep, args=(consumer, self._stopped), name="penstock-task-leases", daemon=True
        )
        self._thread.start()

    def stop(self, _: Any) -> None:
        """Ends before the tasks that are left go back to the queue."""
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
                _LOG.info("leases of tasks wait for redis", extra={"reason": str(error)})
                connection.collapse()


def _renew(channel: Any, qos: Any) -> None:
    now_s = time.time()
    # A copy that no other thread changes meanwhile. kombu offers no public way to the tasks that a worker holds.
    held = dict.fromkeys(qos._delivered.copy(), now_s)
    if held:
        with channel.conn_or_acquire() as client:
            # Only what is still there: a task may end at this moment.
            client.zadd(channel.unacked_index_key, held, xx=True)


def _give_back_silent(channel: Any, observer: LeaseObserver) -> None:
    with channel.conn_or_acquire() as client:
        rows = client.zrange(channel.unacked_index_key, 0, MAX_TASKS_LOOKED_AT - 1, withscores=True)
    renewals = {tag.decode() if isinstance(tag, bytes) else tag: renewed for tag, renewed in rows}
    for tag in observer.silent(renewals, time.monotonic()):
        channel.qos.restore_by_tag(tag)
        _LOG.warning("a task's worker is dead; the task is queued again", extra={"delivery_tag": tag})
