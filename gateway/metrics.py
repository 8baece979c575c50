"""`GET /metrics`: metrics for Prometheus.

Each gateway counts its own HTTP requests and streams. The statistics of pools come from Redis at each scrape, so every
gateway reports the same values: aggregate them over gateways with max, not sum. Only `penstock_redis_changes_total`
counts from a gateway's start.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import nlargest
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from penstock.contract.errors import JobFailedError, PenstockError
from penstock.contract.output import Chunk
from penstock.contract.pool import EVENTS, NO_RIGHTS, PoolStats, QueueState
from penstock.contract.priority import class_of_level, is_background
from penstock.gateway.budget import SharedBudget
from penstock.gateway.kept.connection import Keep
from penstock.gateway.open_feeds import OpenFeeds
from penstock.gateway.redis_watch import MAX_TENANTS, MissingRights, RedisWatch
from penstock.gateway.request_line import FAILED, line_of_request
from penstock.producer.client import AsyncClient
from penstock.producer.client.settings import DECISIONS
from penstock.runtime.loop_watch import LoopWatch, loop_metrics

logger = logging.getLogger("penstock.gateway")

# Percentiles of the times that a gateway measured in the last minutes.

TIMES_WINDOW_S = 300
"""Seconds over which percentiles are taken."""
MAX_TIMES = 2000
"""The newest times that are kept. With more streams in the window, percentiles cover the newest ones."""


class RecentTimes:
    """The times of the last `TIMES_WINDOW_S` seconds, `MAX_TIMES` at most."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=MAX_TIMES)

    def note(self, seconds: float) -> None:
        """Add a time."""
        self._times.append((time.monotonic(), seconds))

    def percentiles(self, percents: Sequence[int]) -> tuple[int, list[float]]:
        """Return the number of times, and these percentiles in seconds (none without times)."""
        oldest_s = time.monotonic() - TIMES_WINDOW_S
        while self._times and self._times[0][0] < oldest_s:
            self._times.popleft()
        ordered = sorted(seconds for _, seconds in self._times)
        if not ordered:
            return 0, []
        return len(ordered), [ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] for percent in percents]


# A gateway's metrics under the names of vLLM's router, which its dashboards and autoscalers query.

RATE_WINDOW_S = 60
"""Seconds over which requests per second are a mean."""
_SERVER = "gateway"


class RequestRate:
    """Counts requests in the last `RATE_WINDOW_S` seconds, with one entry for each second that had some."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()

    def note(self) -> None:
        """Count a request."""
        now = int(time.monotonic())
        count = self._seconds.pop()[1] if self._seconds and self._seconds[-1][0] == now else 0
        self._seconds.append((now, count + 1))
        self._forget(now)

    @property
    def per_s(self) -> float:
        """The mean requests per second."""
        self._forget(int(time.monotonic()))
        return sum(count for _, count in self._seconds) / RATE_WINDOW_S

    def _forget(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] <= now - RATE_WINDOW_S:
            self._seconds.popleft()


class ProcessUsage:
    """The CPU time, memory and disk that this process uses, in percent."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.monotonic(), time.process_time()

    def cpu_percent(self) -> float:
        """Return the percent of one core that this process used since the last call."""
        wall_s, cpu_s = time.monotonic(), time.process_time()
        elapsed_s, used_s = wall_s - self._wall_s, cpu_s - self._cpu_s
        self._wall_s, self._cpu_s = wall_s, cpu_s
        return 100 * used_s / elapsed_s if elapsed_s > 0 else 0.0

    @staticmethod
    def memory_percent() -> float:
        """Return the percent of the machine's memory that this process holds."""
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        return 100 * resident / os.sysconf("SC_PHYS_PAGES")

    @staticmethod
    def disk_percent() -> float:
        """Return the percent of the root file system that is used."""
        usage = shutil.disk_usage("/")
        return 100 * usage.used / usage.total


def process_metrics(rate: RequestRate, usage: ProcessUsage) -> Iterator[Metric]:
    """Yield the metrics that need no Redis."""
    for name, text, value in (
        ("cpu", "Percent of one core that this gateway used since the last scrape.", usage.cpu_percent()),
        ("memory", "Percent of the machine's memory that this gateway holds.", usage.memory_percent()),
        ("disk", "Percent of the root file system that is used.", usage.disk_percent()),
    ):
        yield GaugeMetricFamily(f"router_{name}_usage_percent", text, value=value)
    text = f"POST requests that this gateway answered per second, over {RATE_WINDOW_S} s."
    qps = GaugeMetricFamily("vllm:current_qps", text, labels=("server",))
    qps.add_metric((_SERVER,), rate.per_s)
    yield qps


def pool_metrics(pools: Sequence[PoolStats]) -> Iterator[Metric]:
    """Yield the metrics of the pools."""
    live = GaugeMetricFamily("vllm:healthy_pods_total", "Live nodes of a pool.", labels=("server",))
    text = "Jobs that a pool accepted, by any client."
    accepted = CounterMetricFamily("vllm:num_incoming_requests", text, labels=("model",))
    for pool in pools:
        live.add_metric((pool.pool,), len(pool.nodes))
        accepted.add_metric((pool.pool,), pool.counts["submitted"])
    yield live
    yield accepted


# What a gateway counts itself, and the answer of `/metrics`.

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
_OF_LEVEL = ("pool", "priority", "background")
_OF_STATE = (*_OF_LEVEL, "state")
CLIENT_COUNTERS = {
    "messages": "Messages that arrived on this process's inbox channel.",
    "chunks": "Token chunks in those messages.",
    "bad_messages": "Messages on the inbox channel that could not be decoded.",
    "log_reads": "Pages read from the logs of jobs.",
    "gaps": "Chunks that arrived before a preceding chunk of the same job.",
    "resubscribes": "Times that this process subscribed to its inbox channel again.",
    "resubmits": "Jobs that Redis had lost and this process submitted again.",
    "histories": "Times that Redis had a new history: after a restart, a fail-over or a restore.",
}

_PAUSE_SECONDS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 15.0, 30.0)
_OFFSET = "Seconds by which the clock of Redis is ahead of this machine's."
_CODES_FROM_THE_START = ("no_node", "stream_diverged")
"""Errors that are counted from 0, because alerts watch for their first occurrence."""


class GatewayMetrics:
    """The Prometheus metrics that one gateway process counts itself."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.rate = RequestRate()
        self.usage = ProcessUsage()
        self.requests = Counter(
            "penstock_http_requests", "Answered HTTP requests.", ("path", "status"), registry=registry
        )
        self._refusals = Counter("penstock_http_refusals", "Errors by OpenAI error code.", ("code",), registry=registry)
        text = "Streams that ended with an error of the server, whose status was 200, by error code."
        self._failed_streams = Counter("penstock_http_failed_streams", text, ("code",), registry=registry)
        for code in _CODES_FROM_THE_START:
            self._refusals.labels(code)
        self.open_streams = Gauge("penstock_http_open_streams", "Streams that are open.", registry=registry)
        self._open_sockets = Gauge("penstock_http_open_sockets", "WebSockets that are open.", registry=registry)
        self.first_token_s = Histogram(
            "penstock_time_to_first_token_seconds",
            "Seconds from the body of a streaming request to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.token_s = Histogram(
            "penstock_time_per_output_token_seconds",
            "Mean seconds between the tokens of a stream, after the first token.",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )

        text = "Connections of an earlier gateway that this one took over: continued, complete, idle or closed."
        self.takeovers = Counter("penstock_http_takeovers", text, ("outcome",), registry=registry)
        self.takeover_pause_s = Histogram(
            "penstock_http_takeover_pause_seconds",
            "Seconds from the end of a gateway to the first new bytes of an answer at its successor.",
            buckets=_PAUSE_SECONDS,
            registry=registry,
        )
        text = "Connections that outlive this gateway, because its keeper holds them too."
        self.kept_connections = Gauge("penstock_http_kept_connections", text, registry=registry)
        text = "Answers that end with this gateway, because they could not be kept, by reason."
        self.unkept = Counter("penstock_http_unkept_answers", text, ("reason",), registry=registry)
        self.recent_first_token, self.recent_token = RecentTimes(), RecentTimes()
        self.missing_rights = MissingRights()

    def watch_keep(self, keep: Keep) -> None:
        """Show what a keeper holds of this gateway."""
        self.kept_connections.set_function(lambda: keep.num_kept)
        keep.note_unkept = lambda reason: self.unkept.labels(reason).inc()

    def first_token(self, seconds: float) -> None:
        """Record the time to first token of a stream."""
        self.first_token_s.observe(seconds)
        self.recent_first_token.note(seconds)

    def per_token(self, seconds: float) -> None:
        """Record the time per output token of a stream."""
        self.token_s.observe(seconds)
        self.recent_token.note(seconds)

    def refused(self, error: PenstockError, *, is_logged: bool = False) -> None:
        """Count an error by its code, and note it in the line of the request.

        An internal error, which no caller, job or outage explains, is logged as well, unless it `is_logged`. Of errors
        because Redis's user lacks rights, the first one is.
        """
        self._refusals.labels(error.code).inc()
        line_of_request().note_error(error)
        if error.redis_state == NO_RIGHTS:
            self.missing_rights.note(error)
        elif error.status == HTTPStatus.INTERNAL_SERVER_ERROR and not (is_logged or isinstance(error, JobFailedError)):
            logger.error("a request failed", exc_info=error)

    def failed(self, error: PenstockError) -> None:
        """Count an error that ended an answer after its status 200. The error budget counts those of the server."""
        self.refused(error)
        line_of_request().outcome = FAILED
        if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self._failed_streams.labels(error.code).inc()

    @contextmanager
    def socket(self) -> Iterator[None]:
        """Count a WebSocket as open for the duration of the block."""
        self._open_sockets.inc()
        try:
            yield
        finally:
            self._open_sockets.dec()

    @contextmanager
    def stream(self, *, is_measured: bool = True) -> Iterator[StreamMeter]:
        """Count a stream as open for the duration of the block, and yield a meter for its token times.

        `is_measured`: whether the stream begins with a new job. The times of a replayed log would distort the metrics.
        """
        self.open_streams.inc()
        try:
            yield StreamMeter(self, is_measured=is_measured)
        finally:
            self.open_streams.dec()


class StreamMeter:
    """Measures time to first token and time per output token of one stream."""

    def __init__(self, metrics: GatewayMetrics, *, is_measured: bool = True) -> None:
        self._metrics = metrics
        self._is_measured = is_measured
        self._line = line_of_request()
        self._began_s = time.monotonic()
        self._first_s: float | None = None

    def sent(self) -> None:
        """Note that tokens were sent. The first call records the time to first token."""
        if self._first_s is None and self._is_measured:
            self._first_s = time.monotonic()
            self._metrics.first_token(self._first_s - self._began_s)
            self._line.first_token_s = self._first_s - self._began_s

    def used(self, batch: Sequence[Chunk]) -> None:
        """Note the tokens of the job, if one of its chunks tells them."""
        for chunk in batch:
            self._line.note_usage(chunk.usage)

    def failed(self, error: PenstockError, *, counts: bool = True) -> None:
        """Note that the stream reports a failure. `counts`: whether no other stream has counted it."""
        if counts:
            self._metrics.failed(error)
        self._line.note_error(error)
        self._line.outcome = FAILED

    def ended(self, num_tokens: float) -> None:
        """Record the time per output token of a complete stream.

        `num_tokens` counts the tokens of one choice; for several choices it is their mean.
        """
        if self._first_s is not None and num_tokens > 1:
            self._metrics.per_token((time.monotonic() - self._first_s) / (num_tokens - 1))


class MetricsRoutes:
    """The route `/metrics`: what this process counts, and what Redis says of the pools."""

    def __init__(
        self,
        client: AsyncClient,
        metrics: GatewayMetrics,
        loop_watch: LoopWatch,
        body_budgets: Sequence[SharedBudget],
        result_budget: SharedBudget,
        open_feeds: OpenFeeds,
        watch: RedisWatch,
    ) -> None:
        """The budgets hold the memory of bodies that arrive, and of results that are sent."""
        self._client = client
        self._metrics = metrics
        self._loop_watch = loop_watch
        self._body_budgets = body_budgets
        self._result_budget = result_budget
        self._open_feeds = open_feeds
        self._watch = watch
        self.router = APIRouter()
        self.router.add_api_route("/metrics", self.metrics, response_class=PlainTextResponse)

    async def metrics(self) -> Response:
        """Return the metrics in Prometheus's text format."""
        loop_names = ("penstock_gateway_loop_late_seconds", "penstock_gateway_loop_hold_seconds")
        own = [
            *_of_client(self._client),
            *loop_metrics(*loop_names, self._loop_watch),
            *self._of_memory(),
            GaugeMetricFamily(
                "penstock_gateway_clock_offset_seconds", _OFFSET, value=self._client.servers.clock.offset_s
            ),
            *self._open_feeds.metrics(self._client.servers.clock.now_s()),
            *process_metrics(self._metrics.rate, self._metrics.usage),
        ]
        own += [*self._of_servers(), *await self._watch.scraped(_of_pools)]
        text = generate_latest(self._metrics.registry) + generate_latest(_registry_of(own))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _of_servers(self) -> Iterator[Metric]:
        if servers := self._client.servers.named:
            text = "Whether the Redis answers that PENSTOCK_POOLS names for the pool."
            up = GaugeMetricFamily("penstock_pool_redis_up", text, labels=("pool",))
            yield _per_pool(up, {pool: not one.is_away for pool, one in servers.items()})

    def _of_memory(self) -> Iterator[Metric]:
        text = "Bytes of request bodies above 16 KiB that are held in memory until they are parsed."
        yield GaugeMetricFamily(
            "penstock_gateway_body_bytes", text, value=sum(budget.num_used for budget in self._body_budgets)
        )
        text = "Bytes of large results and records of responses that are held in memory while they are sent."
        yield GaugeMetricFamily("penstock_gateway_result_bytes", text, value=self._result_budget.num_used)


class _FixedCollector(Collector):
    """A collector of metrics that were read before the scrape."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _registry_of(families: Iterable[Metric]) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FixedCollector(list(families)))
    return registry


def _of_client(client: AsyncClient) -> Iterator[Metric]:
    for name, text in CLIENT_COUNTERS.items():
        yield CounterMetricFamily(f"penstock_client_{name}", text, value=getattr(client.stats, name))
    text = "Jobs that this process submitted, by decision: admitted, or the reason why they were refused."
    decisions = CounterMetricFamily("penstock_admission_decisions", text, labels=("decision",))
    for decision in DECISIONS:
        decisions.add_metric((decision,), client.stats.decisions[decision])
    yield decisions


def _of_pools(pools: list[PoolStats]) -> Iterator[Metric]:
    yield from _of_queues({pool.pool: pool.queue for pool in pools})
    blocks = {p.pool: sum(node.kv_blocks_total for node in p.nodes) for p in pools}
    free = {p.pool: sum(node.kv_blocks_free for node in p.nodes) for p in pools}
    for name, text, values in (
        ("penstock_open_jobs", "Jobs that wait or run.", {p.pool: p.num_open for p in pools}),
        ("penstock_nodes", "Live nodes.", {p.pool: len(p.nodes) for p in pools}),
        ("penstock_kv_blocks", "KV blocks of all live nodes.", blocks),
        ("penstock_kv_blocks_free", "Free KV blocks of all live nodes.", free),
    ):
        yield _per_pool(GaugeMetricFamily(name, text, labels=("pool",)), values)
    yield _kept(pools)
    for event, text in EVENTS.items():
        family = CounterMetricFamily(f"penstock_pool_{event}", f"{text[0].upper()}{text[1:]}.", labels=("pool",))
        yield _per_pool(family, {p.pool: p.counts[event] for p in pools})
    text = "Seconds since the oldest pause began that lasts: of the pool, a class or a tenant (what)."
    paused = GaugeMetricFamily("penstock_pool_paused_seconds", text, labels=("pool", "what"))
    for one in pools:
        for what, paused_ms in one.paused_ms.items():
            paused.add_metric((one.pool, what), paused_ms / 1000)
    yield paused
    yield from pool_metrics(pools)


def _kept(pools: list[PoolStats]) -> Metric:
    family = GaugeMetricFamily(
        "penstock_tenant_kept_bytes",
        "Bytes in Redis of a tenant's jobs and results, for the tenants with the most bytes.",
        labels=("pool", "tenant"),
    )
    for pool in pools:
        for tenant in nlargest(MAX_TENANTS, pool.kept, key=lambda name: pool.kept[name]):
            family.add_metric((pool.pool, tenant), pool.kept[tenant])
    return family


def _of_queues(queues: Mapping[str, QueueState]) -> Iterator[Metric]:
    """Yield the metrics of open jobs. docs/QUEUE.md describes the states."""
    depth = GaugeMetricFamily("penstock_queue_depth", "Open jobs, by state.", labels=_OF_STATE)
    age = GaugeMetricFamily("penstock_queue_age_seconds", "Seconds of the longest wait, by state.", labels=_OF_STATE)
    cost = GaugeMetricFamily("penstock_queue_cost_tokens", "KV tokens that queued jobs need.", labels=_OF_LEVEL)
    expired = CounterMetricFamily("penstock_queue_expired", "Jobs that passed their deadline.", labels=_OF_LEVEL)
    text = "Share of the engines' time in the last minute. Absent if no engine ran a step."
    share = GaugeMetricFamily("penstock_queue_engine_share_ratio", text, labels=_OF_LEVEL)
    text = "Seconds in which the nodes complete the queued jobs. Absent if there are some and the pace is unknown."
    backlog = GaugeMetricFamily("penstock_queue_backlog_seconds", text, labels=("pool", "background"))
    for pool, queue in queues.items():
        for state, jobs in queue.waiting.items():
            _add_per_level(depth, pool, jobs.count, state)
            _add_per_level(age, pool, [ms / 1000 for ms in jobs.oldest_ms], state)
        _add_per_level(depth, pool, queue.running, "running")
        _add_per_level(cost, pool, queue.cost)
        _add_per_level(expired, pool, queue.expired)
        _add_per_level(share, pool, queue.engine_shares or ())
        for background, seconds in zip(("false", "true"), queue.backlog_s, strict=True):
            if seconds is not None:
                backlog.add_metric((pool, background), seconds)
    yield from (depth, age, cost, expired, share, backlog)


def _add_per_level(
    family: GaugeMetricFamily | CounterMetricFamily, pool: str, values: Sequence[float], *state: str
) -> None:
    for level, value in enumerate(values):
        labels = (pool, class_of_level(level).label, str(is_background(level)).lower(), *state)
        family.add_metric(labels, value)


def _per_pool(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, int]) -> Metric:
    for pool, value in values.items():
        family.add_metric((pool,), value)
    return family
