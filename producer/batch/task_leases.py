"""Leases on Celery tasks: each worker renews the tasks that it holds, and queues the tasks of a dead worker again.

Celery's Redis transport keeps a taken task in `unacked` and its start time in `unacked_index`. After the visibility
timeout it gives the task to another worker, so the timeout must exceed the time of most tasks.

Here a worker writes the time again and again while it lives. If another worker sees the same time for a whole lease,
measured by its own clock, the task's worker is dead. So clocks of two machines are never compared, and a long task
keeps its lease. For the visibility timeout Celery does compare them, so both times are made those of Redis.

In a user's own app, workers without penstock's tasks do not renew anything. So there the leases cover penstock's tasks
only, and all other tasks keep Celery's visibility timeout.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from celery import bootsteps
from celery.worker.consumer.tasks import Tasks
from kombu.exceptions import OperationalError
from kombu.transport import virtual
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from penstock.queue.broker.redis_clock import RedisClock

_LOG = logging.getLogger(__package__)

RENEWALS_PER_LEASE = 5
MAX_TASKS_LOOKED_AT = 10_000
_MAX_OFFSET_S = 1.0
"""Up to this difference from Redis's clock, kombu's time of a taken task stays until the task is renewed."""
_STOP_TIMEOUT_S = 5.0


class LeaseObserver:
    """Finds the tasks that no worker renews."""

    def __init__(self, lease_s: float, *, max_gap_s: float, now_s: float) -> None:
        """`max_gap_s`: all leases restart after a longer pause between checks, because Redis or this process hung."""
        self._lease_s = lease_s
        self._max_gap_s = max_gap_s
        self._looked_s = now_s
        # Keyed by id: Celery's id of a delivery.
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


class _TaskNames:
    """The names of the tasks that workers hold. Redis is asked for a task's name once."""

    def __init__(self) -> None:
        # Keyed by id: Celery's id of a delivery.
        self._known: dict[str, str] = {}

    def of(self, channel: Any, client: Any, tags: Iterable[str]) -> dict[str, str]:
        """Return the name of each task by its delivery tag; empty for a task that has ended."""
        pipe = client.pipeline(transaction=False)
        fresh = [tag for tag in tags if tag not in self._known]
        for tag in fresh:
            pipe.hget(channel.unacked_key, tag)
        found = dict(zip(fresh, map(_name_of, pipe.execute()), strict=True)) if fresh else {}
        self._known = {tag: self._known[tag] if tag in self._known else found[tag] for tag in tags}
        return self._known


def _name_of(stored: bytes | None) -> str:
    """Return the name of the task in an entry of kombu's `unacked`: a message, its exchange and its routing key."""
    if stored is None:
        return ""
    message, *_ = json.loads(stored)
    return str(message.get("headers", {}).get("task", ""))


def leases_step(lease_s: float, names: Collection[str] | None, clock: RedisClock) -> type[bootsteps.StartStopStep]:
    """Return a Celery boot step that holds leases on the tasks with these names; None: on all tasks.

    `clock` learns the time of Celery's Redis.
    """

    class TaskLeases(bootsteps.StartStopStep):  # type: ignore[misc]  # celery ships no types
        """A thread that renews this worker's leases and checks those of other workers, with any kind of pool."""

        requires = (Tasks,)

        def __init__(self, consumer: Any, **_: Any) -> None:
            super().__init__(consumer)
            self._thread: threading.Thread | None = None
            self._stopped = threading.Event()

        def start(self, consumer: Any) -> None:
            """Start the thread. Celery calls this for each new connection of the worker."""
            if consumer.connection.transport.driver_type != "redis":
                return  # Other brokers notice themselves that a worker is dead.
            channel = consumer.task_consumer.channel
            survive_lost_broker(channel)
            times = RedisTimes(channel, clock)
            self._stopped = threading.Event()
            self._thread = threading.Thread(
                target=keep_leases,
                args=(consumer, self._stopped, lease_s, names, times),
                name="penstock-task-leases",
                daemon=True,
            )
            self._thread.start()

        def stop(self, _: Any) -> None:
            """Stop the thread before Celery returns unfinished tasks to the queue."""
            self._stopped.set()
            if self._thread is not None:
                self._thread.join(_STOP_TIMEOUT_S)

    return TaskLeases


class RedisTimes:
    """Celery's times of taken tasks by the clock of its Redis, instead of that of each worker's machine.

    Without it, a worker whose clock is ahead would give away the tasks of all others again and again.
    """

    def __init__(self, channel: Any, clock: RedisClock) -> None:
        """`channel`: that of the worker's consumer. `clock` learns the time of its Redis."""
        self._channel, self._clock = channel, clock
        # If Redis does not answer now, the thread that renews leases asks again.
        with suppress(OperationalError, RedisError, OSError), channel.conn_or_acquire() as client:
            self.look(client)
        self._append = channel.qos.append
        channel.qos.append = self._append_timed

    def look(self, client: Any) -> None:
        """Ask Redis for its time. Raises redis-py's errors."""
        sent_s = time.time()
        seconds, us = client.time()
        self._clock.note(seconds * 1_000_000 + us, sent_s, time.time())
        # kombu subtracts it from this machine's time.
        self._channel.qos.visibility_timeout = self._channel.visibility_timeout - self._clock.offset_s

    def now_s(self) -> float:
        """Return Redis's time as Unix time in seconds."""
        return self._clock.now_s()

    def _append_timed(self, message: Any, delivery_tag: str) -> None:
        """Do what kombu's `QoS.append` does, with Redis's time.

        kombu's own time, changed afterwards, would stand in Redis for a moment. Another worker could take the task as
        expired then.
        """
        if abs(self._clock.offset_s) <= _MAX_OFFSET_S:
            self._append(message, delivery_tag)
            return
        qos, info = self._channel.qos, message.delivery_info
        stored = json.dumps([message._raw, info["exchange"], info["routing_key"]])
        with qos.pipe_or_acquire() as pipe:
            pipe.zadd(qos.unacked_index_key, {delivery_tag: self.now_s()}).hset(qos.unacked_key, delivery_tag, stored)
            pipe.execute()
        virtual.QoS.append(qos, message, delivery_tag)  # type: ignore[no-untyped-call]


def survive_lost_broker(channel: Any) -> None:
    """Let a worker outlive the end of its Redis while it holds tasks.

    kombu 5.7 returns them to the queue when it closes the lost connection, and acknowledges those that end meanwhile.
    Its channel has no address any more by then, so the worker exits with an AttributeError, which is no connection
    error (https://github.com/celery/kombu/issues/582). The tasks are still in Redis as taken, so they return by their
    leases or after the visibility timeout.
    """
    address_of = channel._connparams

    def known_address(**options: Any) -> Any:
        if getattr(channel.connection, "client", None) is None:
            raise RedisConnectionError("the connection to Celery's Redis is lost")
        return address_of(**options)

    channel._connparams = known_address


def keep_leases(
    consumer: Any, stopped: threading.Event, lease_s: float, names: Collection[str] | None, times: RedisTimes
) -> None:
    """Renew and check leases until `stopped` is set, also after errors."""
    observer, known = LeaseObserver(lease_s, max_gap_s=lease_s / 2, now_s=time.monotonic()), _TaskNames()
    with consumer.app.connection_for_read() as connection:
        while not stopped.wait(lease_s / RENEWALS_PER_LEASE):
            try:
                channel = connection.default_channel
                with channel.conn_or_acquire() as client:
                    times.look(client)
                    _renew(channel, client, consumer.task_consumer.channel.qos, names, times.now_s())
                    rows = client.zrange(channel.unacked_index_key, 0, MAX_TASKS_LOOKED_AT - 1, withscores=True)
                    renewals = {tag.decode() if isinstance(tag, bytes) else tag: at_s for tag, at_s in rows}
                    if names is not None:
                        name_of = known.of(channel, client, renewals)
                        renewals = {tag: at_s for tag, at_s in renewals.items() if name_of[tag] in names}
                    for tag in observer.silent(renewals, time.monotonic()):
                        channel.qos.restore_by_tag(tag)
                        _LOG.warning("a task's worker is dead; the task is queued again", extra={"delivery_tag": tag})
            except (OperationalError, RedisError, OSError) as error:
                _LOG.info("task leases cannot be renewed while redis is unreachable", extra={"reason": str(error)})
                _forget(connection)
            except Exception:
                # Without this thread, other workers would run this worker's tasks a second time.
                _LOG.exception("task leases were not renewed")
                _forget(connection)


def _forget(connection: Any) -> None:
    """Drop a broken connection. The next use connects again."""
    with suppress(OperationalError, RedisError, OSError):
        connection.collect()


def _renew(channel: Any, client: Any, qos: Any, names: Collection[str] | None, now_s: float) -> None:
    # Copied, because other threads change it. kombu has no public API for the tasks that a worker holds.
    held = qos._delivered.copy()
    ours = {tag: now_s for tag, message in held.items() if names is None or message.headers.get("task") in names}
    if ours:
        # Update only existing members: a task may end at this moment.
        client.zadd(channel.unacked_index_key, ours, xx=True)
