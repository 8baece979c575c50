"""What each Redis says of itself and of its pools, read in the background.

A scrape and a probe wait for no Redis that is away: they get what was read last, with its age. A change of a Redis's
state is logged when it begins and when it ends, under the name that the metric has, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from heapq import nlargest

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from penstock.contract.errors import PenstockError
from penstock.contract.pool import AWAY, NO_RIGHTS, REDIS_STATES, PoolStats, RedisState
from penstock.contract.schedule import ScheduleTotals
from penstock.producer.client import AsyncClient
from penstock.producer.client.servers import QueueServer
from penstock.queue.webhooks.deliveries import WebhookStats

logger = logging.getLogger("penstock.gateway")

LOOK_S = 1.0
"""Seconds between two looks at a Redis. A scrape asks for one at once."""
LOOK_TIMEOUT_S = 2.0
"""A Redis that has not answered within this time is away."""
SLOW_S = 1.0
"""A Redis whose answer takes longer, twice in a row, is slow."""
QUIET_S = 30.0
"""After so long without a call that Redis refused, its user has the rights again."""
FULL_RATIO = 0.9
"""From this share of its memory on, Redis is full: the queue refuses all jobs."""
SCRAPE_PATIENCE_S = 0.15
"""Seconds that a scrape waits for the look that it asked for. It does not wait for a Redis that is known to be away."""
MAX_AGE_S = 60.0
"""A scrape leaves out what was read longer ago."""
REFUSING = frozenset((AWAY, "loading", "read_only", "disk_full", "no_replicas", NO_RIGHTS))
"""The states in which a Redis accepts no job."""


def state_in(redis: RedisState) -> str:
    """Return the name of the problem that Redis reports of itself; empty if there is none."""
    if redis.is_loading:
        return "loading"
    if redis.is_replica:
        return "read_only"
    if not (redis.is_aof_ok and redis.is_snapshot_ok):
        return "disk_full"
    if redis.num_good_replicas == 0:
        return "no_replicas"
    return "full" if redis.max_bytes and redis.used_bytes >= FULL_RATIO * redis.max_bytes else ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a Redis said at its last look that was answered."""

    at_s: float
    """Time of this process's monotonic clock."""
    redis: RedisState
    pools: list[PoolStats] = field(default_factory=list)
    webhooks: WebhookStats | None = None
    """None of a Redis that is not the directory."""
    num_rows_left: int = 0
    schedules: ScheduleTotals | None = None


class ServerWatch:
    """Looks at one Redis."""

    def __init__(self, server: QueueServer, client: AsyncClient | None, names: tuple[str, ...]) -> None:
        """`client`: that of the directory, which has webhooks and batches. `names` of the Redis in logs and metrics."""
        self.names = names
        self.state = AWAY
        """The name of its problem; empty if it has none."""
        self.seen: Seen | None = None
        self.metrics = RedisMetrics()
        self._stats = server.looks
        self._client = client
        self._changed_s = time.monotonic()
        self._has_looked = self._was_late = False
        self._asked = asyncio.Event()
        self._done = asyncio.Event()

    @property
    def problem(self) -> str:
        """The state, empty before the first look."""
        return self.state if self._has_looked else ""

    async def run(self) -> None:
        """Look at the Redis until canceled."""
        while True:
            is_asked, done = self._asked.is_set(), self._done
            self._asked.clear()
            await self._look(is_whole=is_asked or self.seen is None)
            done.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._asked.wait()

    async def fresh(self, patience_s: float) -> None:
        """Ask for a look that begins now, and wait for its end, for `patience_s` at most."""
        if not self._asked.is_set():
            self._asked.set()
            self._done = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._done.wait()

    async def _look(self, *, is_whole: bool) -> None:
        began_s, last = time.monotonic(), self.seen
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S):
                redis = await self._stats.redis_state()
                late_s = time.monotonic() - began_s
                self.metrics.note(redis)
                if is_whole and not redis.is_loading:
                    pools, client = await self._stats.all(), self._client
                    webhooks = None if client is None else await client.webhooks.queue.stats()
                    num_rows = 0 if client is None else await client.batches.num_rows_left()
                    schedules = None if client is None else await client.schedules.store.totals()
                    self.seen = Seen(began_s, redis, pools, webhooks, num_rows, schedules)
                elif last is not None:
                    self.seen = replace(last, redis=redis)
        except TimeoutError:
            self._became(AWAY, f"no answer within {LOOK_TIMEOUT_S:.0f} s")
        except PenstockError as error:
            self._became(error.redis_state or AWAY, error.reason)
        else:
            is_late, self._was_late = late_s > SLOW_S, late_s > SLOW_S and self._was_late
            found = state_in(redis) or ("slow" if is_late and self._was_late else "")
            self._was_late = is_late
            self._became(found, REDIS_STATES.get(found, ""))

    def _became(self, state: str, reason: str) -> None:
        before, now_s = self.problem, time.monotonic()
        self._has_looked, self.state = True, state
        if state == before:
            return
        facts = {"redis": ", ".join(self.names), "seconds": round(now_s - self._changed_s, 1)}
        self._changed_s = now_s
        if state:
            logger.warning("redis has a problem", extra={**facts, "state": state, "reason": reason, "before": before})
        else:
            logger.warning("redis serves again", extra={**facts, "before": before})


class MissingRights:
    """Warns once when Redis begins to refuse calls of requests, and once when it refuses none any more.

    Its user may lack a right that no look needs. Then each request fails, and the state of Redis says nothing.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._first_s: float | None = None
        self._last_s = 0.0
        self._num_refused = 0

    def note(self, error: PenstockError) -> None:
        """Note a request whose call Redis refused."""
        self._last_s = time.monotonic()
        self._num_refused += 1
        if self._first_s is None and not self._is_known:
            self._first_s, self._num_refused = self._last_s, 1
            logger.warning("redis refuses calls of requests", extra={"state": NO_RIGHTS, "reason": error.reason})

    def look(self, *, is_known: bool) -> None:
        """Warn if no call was refused for a while. is_known: whether a Redis has the state that stands for it."""
        self._is_known = is_known
        if self._first_s is None or (not is_known and time.monotonic() - self._last_s < QUIET_S):
            return
        if not is_known:
            facts = {"seconds": round(self._last_s - self._first_s, 1), "refused": self._num_refused}
            logger.warning("redis has refused no call of a request for a while", extra=facts)
        self._first_s = None


class RedisWatch:
    """Looks at every Redis of a gateway."""

    def __init__(self, client: AsyncClient, missing_rights: MissingRights) -> None:
        self._client = client
        self._missing_rights = missing_rights
        self._watches: list[ServerWatch] = []

    async def run(self) -> None:
        """Look until canceled."""
        servers = self._client.servers
        for server in servers.all:
            is_directory = server is servers.directory
            names = tuple(pool for pool, one in servers.named.items() if one is server)
            client = self._client if is_directory else None
            self._watches.append(ServerWatch(server, client, ("directory",) if is_directory else names))
        async with asyncio.TaskGroup() as group:
            for watch in self._watches:
                group.create_task(watch.run(), name="penstock looks at a Redis")
            while True:
                self._missing_rights.look(is_known=any(watch.problem == NO_RIGHTS for watch in self._watches))
                await asyncio.sleep(LOOK_S)

    @property
    def problem(self) -> str:
        """The state of the directory, empty while it has no problem."""
        return self._watches[0].problem if self._watches else ""

    async def scraped(self, of_pools: Callable[[list[PoolStats]], Iterator[Metric]]) -> list[Metric]:
        """Return the metrics of all Redis, those of their pools as `of_pools` makes them."""
        watches, now_s = self._watches, time.monotonic()
        await asyncio.gather(*(watch.fresh(SCRAPE_PATIENCE_S) for watch in watches if watch.problem != AWAY))
        known = [watch.seen for watch in watches if watch.seen and now_s - watch.seen.at_s < MAX_AGE_S]
        found = [*self._of_states()]
        answers = bool(watches) and watches[0].state != AWAY
        directory = watches[0].seen if watches else None
        history = watches[0].metrics if watches else RedisMetrics()
        found += history.metrics(directory.redis if directory is not None and answers else None)
        if known:
            found += of_pools([pool for seen in known for pool in seen.pools])
        if directory in known and directory is not None and directory.webhooks is not None:
            found += _of_directory(directory.webhooks, directory.num_rows_left)
            if directory.schedules is not None:
                found += _of_schedules(directory.schedules, self._client.servers.clock.now_s())
        return found

    def _of_states(self) -> Iterator[Metric]:
        text = "1 for the problem that a Redis has, 0 for all others."
        states = GaugeMetricFamily("penstock_redis_problem", text, labels=("redis", "state"))
        text = "Seconds since this gateway last read what it reports of a Redis and its pools."
        ages = GaugeMetricFamily("penstock_redis_read_age_seconds", text, labels=("redis",))
        now_s = time.monotonic()
        for watch in self._watches:
            for name in watch.names:
                for state in REDIS_STATES:
                    states.add_metric((name, state), watch.problem == state)
                if watch.seen is not None:
                    ages.add_metric((name,), now_s - watch.seen.at_s)
        yield from (states, ages)


# The metrics of one Redis.

MAX_TENANTS = 100
"""Tenants of a pool that are reported, largest first. The limit bounds the number of Prometheus series."""
_OF_WEBHOOKS = {
    "penstock_webhooks_delivered": "Webhooks that their receivers accepted.",
    "penstock_webhooks_retried": "Attempts to deliver a webhook that failed and are repeated.",
    "penstock_webhooks_dead": "Webhooks that were given up.",
}


def _of_directory(webhooks: WebhookStats, num_rows_left: int) -> Iterator[Metric]:
    text = "Rows of open batches without a stored answer, those in the queue included. Redis knows it."
    yield GaugeMetricFamily("penstock_batch_rows_left", text, value=num_rows_left)
    text = "Webhooks that wait for their next attempt, for the tenants with the most of them."
    pending = GaugeMetricFamily("penstock_webhooks_pending", text, labels=("tenant",))
    for tenant in nlargest(MAX_TENANTS, webhooks.pending, key=lambda name: webhooks.pending[name]):
        pending.add_metric((tenant,), webhooks.pending[tenant])
    yield pending
    for name, text in _OF_WEBHOOKS.items():
        count = webhooks.counts.get(name.rpartition("_")[2], 0)
        yield CounterMetricFamily(name, text, value=count)


_OF_RUNS = {
    "penstock_schedule_runs_started": "Runs of schedules that started.",
    "penstock_schedule_runs_missed": "Runs of schedules whose time had passed when a gateway looked.",
    "penstock_schedule_runs_skipped": "Runs of schedules left out, because the run before had not ended.",
    "penstock_schedule_runs_failed": "Runs of schedules that could not start.",
}


def _of_schedules(totals: ScheduleTotals, now_s: float) -> Iterator[Metric]:
    counts = {f"penstock_schedule_runs_{end}": count for end, count in totals.counts.items()}
    for name, text in _OF_RUNS.items():
        yield CounterMetricFamily(name, text, value=counts[name])
    late_s = 0.0 if totals.first_look_ms is None else max(0.0, now_s - totals.first_look_ms / 1000)
    text = "Seconds for which the schedule that is due first has waited for a gateway. Redis knows it."
    yield GaugeMetricFamily("penstock_schedules_late_seconds", text, value=late_s)


class RedisMetrics:
    """Turns the state of Redis into metrics, and counts how often another process of Redis answered."""

    def __init__(self) -> None:
        self._run_id = ""
        self._num_changes = 0

    def note(self, state: RedisState) -> None:
        """Note an answer of Redis, whether it is for a scrape or not."""
        self._num_changes += self._run_id not in ("", state.run_id)
        self._run_id = state.run_id

    def metrics(self, state: RedisState | None) -> Iterator[Metric]:
        """Yield the metrics of one scrape; `state` is None if Redis did not answer."""
        yield GaugeMetricFamily("penstock_redis_up", "Whether Redis answers.", value=state is not None)
        text = "Times that a restarted or another Redis answered this gateway, such as after a fail-over."
        yield CounterMetricFamily("penstock_redis_changes", text, value=self._num_changes)
        if state is not None:
            yield from _of_redis(state)


def _of_redis(state: RedisState) -> Iterator[Metric]:
    yield GaugeMetricFamily("penstock_redis_used_bytes", "Memory that Redis uses.", value=state.used_bytes)
    text = "Memory limit of Redis; 0 means no limit."
    yield GaugeMetricFamily("penstock_redis_max_bytes", text, value=state.max_bytes)
    text = "Whether the last write to the append-only file (aof), or the last snapshot, succeeded. No aof without one."
    written = GaugeMetricFamily("penstock_redis_persistence_ok", text, labels=("kind",))
    if state.is_aof_on:
        written.add_metric(("aof",), state.is_aof_ok)
    written.add_metric(("snapshot",), state.is_snapshot_ok)
    yield written
    if state.is_aof_on:
        text = "Size of the append-only file."
        yield GaugeMetricFamily("penstock_redis_aof_bytes", text, value=state.aof_bytes)
        text = "Size of the append-only file after its last rewrite."
        yield GaugeMetricFamily("penstock_redis_aof_base_bytes", text, value=state.aof_base_bytes)
    text = "Writes to the append-only file that waited for a slow disk, since Redis started."
    yield CounterMetricFamily("penstock_redis_delayed_fsyncs", text, value=state.delayed_fsyncs)
    yield GaugeMetricFamily("penstock_redis_replicas", "Replicas that are connected.", value=state.num_replicas)
    if state.replica_lag_s is not None and state.replica_lag_bytes is not None:
        text = "Seconds since the slowest replica acknowledged anything. Absent without replicas."
        yield GaugeMetricFamily("penstock_redis_replica_lag_seconds", text, value=state.replica_lag_s)
        text = "Bytes that the slowest replica has not acknowledged. Absent without replicas."
        yield GaugeMetricFamily("penstock_redis_replica_lag_bytes", text, value=state.replica_lag_bytes)
