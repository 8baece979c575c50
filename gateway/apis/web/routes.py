"""The web page at `/`, its files at `/web/FILE`, and `GET /dashboard`, the state that its dashboard shows."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib.resources import files
from itertools import islice
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import BusyError, UnavailableError
from penstock.contract.pool import JOB_TIMES, LiveNode, PoolActivity, QueueState
from penstock.contract.priority import NUM_LEVELS, is_background, level_label
from penstock.gateway.http.dialect import HttpDialect, RouteIf, Services
from penstock.gateway.metrics import TIMES_WINDOW_S, GatewayMetrics, RecentTimes
from penstock.gateway.route_doc import PROBE_METHODS
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.event_stream import until_disconnected, while_connected
from penstock.gateway.stream.writer import EVENT_STREAM, CallerGoneError, EventWriter
from penstock.producer.client import AsyncClient
from penstock.producer.client.pools import CachedState
from penstock.queue.broker.producer import ServedPool

# The state that the dashboard shows, as JSON: pools, nodes, tenants, events, and this gateway's times.

MAX_POOLS = 16
"""Pools in a state; those with a live node come first."""
MAX_NODES = 64
"""Nodes of a pool in a state, by name. Sums cover all nodes."""
MAX_TENANTS = 8
"""Tenants of a pool in a state, those with the most jobs. One entry sums up the others."""
_PERCENTS = (50, 90, 99)
_GATEWAY_NAME = f"{socket.gethostname()}:{os.getpid()}"
_OF_NODE = (
    *(
        "node_id",
        "draining",
        "troubles",
        "past_troubles",
        "num_jobs",
        "num_running",
        "num_waiting",
        "max_num_seqs",
        "mean_batch",
    ),
    *("kv_blocks_total", "kv_blocks_free", "kv_blocks_cached", "block_size"),
    *("swap_blocks_total", "swap_blocks_free", "swap_blocks_cached"),
    *("prefill_tokens", "decode_tokens", "num_preemptions", "num_swaps", "step_ms_p50", "step_ms_p99"),
    *("prefix_lookup_tokens", "prefix_hit_tokens", "prefix_hit_rate", "page_utilization", "weight_bytes"),
    *("num_ranks", "num_rank_losses", "stage_idle", "rank_exchange_ms", "rank_wait_ms"),
    *("rank_weight_bytes", "rank_kv_bytes", "gpu_utilization", "gpu_memory_used_bytes", "gpu_memory_total_bytes"),
)
"""The fields of a pressure record that the dashboard shows."""
_SUMMED = (
    *("kv_blocks_total", "kv_blocks_free", "kv_blocks_cached", "num_jobs", "num_preemptions", "num_swaps"),
    *("prefix_lookup_tokens", "prefix_hit_tokens"),
)
"""The fields that it shows as sums over all nodes of a pool."""


def gateway_of(metrics: GatewayMetrics) -> dict[str, Any]:
    """Return the name of this gateway, and the times that it measured in the last minutes."""
    return {
        "name": _GATEWAY_NAME,
        "window_s": TIMES_WINDOW_S,
        "first_token": _times(metrics.recent_first_token),
        "per_token": _times(metrics.recent_token),
    }


def pool_of(record: ServedPool, activity: PoolActivity) -> dict[str, Any]:
    """Return the state of one pool."""
    return {
        "pool": activity.pool,
        "model": record.model,
        "classes": _classes(activity.queue),
        "backlog_s": dict(zip(("foreground", "background"), activity.queue.backlog_s, strict=True)),
        "background_share": activity.queue.background_share,
        "tenants": _tenants(activity),
        "counts": dict(activity.counts),
        "num_nodes": len(activity.nodes),
        "nodes": [_node(node) for node in activity.nodes[:MAX_NODES]],
        "totals": {name: _sum(activity.nodes, name) for name in _SUMMED},
        "last_hour": _last_hour(activity.nodes),
        "events": [
            {"at_ms": event.at_ms, "kind": event.kind, "node": event.node_id, "job": event.job_id}
            | {"from": event.source, "reason": event.reason}
            for event in activity.events
        ],
    }


def _times(recent: RecentTimes) -> dict[str, Any]:
    count, values = recent.percentiles(_PERCENTS)
    percentiles = zip(_PERCENTS, values, strict=False)
    return {"count": count, **{f"p{percent}_ms": round(1000 * value, 2) for percent, value in percentiles}}


def _last_hour(nodes: Sequence[LiveNode]) -> dict[str, Any]:
    """Return percentiles of the jobs' times in the last hour, over all nodes, by interpolation in histograms."""
    return {
        name: _percentiles([node.pressure.times_of_hour.get(name, ()) for node in nodes], bounds)
        for name, bounds in JOB_TIMES.items()
    }


def _percentiles(of_nodes: Sequence[Sequence[int]], bounds: Sequence[float]) -> dict[str, Any]:
    # A node of another release may have other buckets.
    counts = [sum(each) for each in zip(*(one for one in of_nodes if len(one) == len(bounds) + 1), strict=True)]
    total = sum(counts)
    found: dict[str, Any] = {"count": total}
    for percent in _PERCENTS if total else ():
        rank, below = total * percent / 100, 0
        for index, count in enumerate(counts):
            if below + count >= rank:
                low, high = bounds[index - 1] if index else 0.0, bounds[min(index, len(bounds) - 1)]
                found[f"p{percent}_ms"] = round(1000 * (low + max(0.0, high - low) * (rank - below) / count), 2)
                break
            below += count
    return found


def _classes(queue: QueueState) -> list[dict[str, Any]]:
    return [
        {"class": level_label(level), "running": queue.running[level], "expired": queue.expired[level]}
        | {state: jobs.count[level] for state, jobs in queue.waiting.items()}
        | {"oldest_ms": queue.longest_wait_ms[level]}
        | {"engine_share": None if queue.engine_shares is None else round(queue.engine_shares[level], 4)}
        for level in range(NUM_LEVELS)
        if not is_background(level) or queue.is_used(level)
    ]


def _tenants(activity: PoolActivity) -> list[dict[str, Any]]:
    """Return the jobs of the tenants with the most, and of the others together, under the tenant None."""
    running: Counter[str] = Counter()
    for node in activity.nodes:
        running.update(node.pressure.jobs_by_tenant)
    queued = Counter(activity.queued_of_tenants)
    shown = [tenant for tenant, _ in (running + queued).most_common(MAX_TENANTS)]
    rows: list[dict[str, Any]] = [
        {"tenant": tenant, "running": running[tenant], "queued": queued[tenant]} for tenant in shown
    ]
    totals = {"running": _sum(activity.nodes, "num_jobs"), "queued": sum(activity.queue.queued)}
    # Numbers of one moment come from several reads, so a difference may be negative.
    others = {name: max(0, total - sum(row[name] for row in rows)) for name, total in totals.items()}
    return [*rows, {"tenant": None, **others}] if any(others.values()) else rows


def _node(node: LiveNode) -> dict[str, Any]:
    return {"silent_ms": node.silent_ms, **{name: getattr(node.pressure, name) for name in _OF_NODE}}


def _sum(nodes: Sequence[LiveNode], name: str) -> int:
    return sum(getattr(node.pressure, name) for node in nodes)


# The feed of the dashboard: one state per second for all its viewers together, and none without viewers.

STATE_INTERVAL_S = 1.0
"""Seconds between two states."""
REDIS_TIMEOUT_S = 2.0
"""Seconds that a state waits for Redis. After that it has no pools."""
MAX_VIEWERS = 100
"""Viewers of one gateway."""
MAX_STREAM_S = 600.0
"""Seconds after which a stream of states ends. The page connects again, which checks its API key again."""


class Dashboard:
    """The states of this gateway's dashboard, shared by its viewers."""

    def __init__(self, client: AsyncClient, metrics: GatewayMetrics, stopping: asyncio.Event) -> None:
        """`stopping` ends all streams of states, because the gateway stops."""
        self._client = client
        self._metrics = metrics
        self._states = CachedState(self._read, STATE_INTERVAL_S)
        self._num_viewers = 0
        self._stopping = stopping

    async def state(self) -> bytes:
        """Return the state as JSON, at most a second old."""
        return await self._states.get()

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """Count a viewer for the duration of the block. Raises BusyError if there are too many."""
        if self._num_viewers >= MAX_VIEWERS:
            message = f"this gateway serves at most {MAX_VIEWERS} viewers of the dashboard"
            raise BusyError(message, retry_after_ms=10_000, code="too_many_viewers")
        self._num_viewers += 1
        try:
            yield
        finally:
            self._num_viewers -= 1

    async def states(self) -> AsyncIterator[bytes]:
        """Yield each new state as JSON, until the gateway stops or the stream is old."""
        ends_s = time.monotonic() + MAX_STREAM_S
        while not self._stopping.is_set() and time.monotonic() < ends_s:
            yield await self.state()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATE_INTERVAL_S):
                    await self._stopping.wait()

    async def _read(self) -> bytes:
        client = self._client
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                records = dict(islice((await client.pools()).items(), MAX_POOLS))
                away = sorted(pool for pool, server in client.servers.named.items() if server.is_away)
                activities = await client.activity([*records])
        except (TimeoutError, UnavailableError):
            return to_json(
                {
                    "at_ms": int(1000 * client.servers.clock.now_s()),
                    "redis_up": False,
                    "gateway": gateway_of(self._metrics),
                    "pools": [],
                }
            )
        folded = [one.pool for one in activities if records[one.pool].is_folded(one.queue.num_waiting)]
        pools = [pool_of(records[one.pool], one) for one in activities if one.pool not in folded]
        state = {
            "at_ms": int(1000 * client.servers.clock.now_s()),
            "redis_up": True,
            "gateway": gateway_of(self._metrics),
            "pools": pools,
        }
        state |= {"folded": folded} if folded else {}
        return to_json(state | {"away": away} if away else state)


# The files of the web page, read once.

PAGE = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES = {
    path.name: path.read_bytes()
    for folder in ("static", "vendor")
    for path in files("penstock.gateway.apis.web").joinpath(folder).iterdir()
    if path.name.rpartition(".")[2] in _TYPES
}
_ETAGS = {name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, content in _FILES.items()}
ASSET_PATHS = frozenset(f"/web/{name}" for name in _FILES)
"""The paths of the page's files. They need no API key, because a browser sends none with them."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page's Content-Security-Policy: its own files and its own gateway, and nothing else."""
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    # A browser asks each time, and gets a 304 until the gateway is updated.
    "Cache-Control": "no-cache",
}


def wants_page(scope: Scope) -> bool:
    """Return whether a request accepts HTML, as those of browsers do. Others get what another API has at `/`."""
    return "text/html" in Headers(scope=scope).get("accept", "").lower()


async def _page(request: Request) -> Response:
    return asset_response(request, PAGE)


def asset_response(request: Request, name: str) -> Response:
    """Return the answer with one of the page's files."""
    headers = _HEADERS | {"ETag": _ETAGS[name]} | ({"Vary": "Accept"} if name == PAGE else {})
    if request.headers.get("if-none-match") == _ETAGS[name]:
        return Response(status_code=304, headers=headers)
    return Response(_FILES[name], media_type=_TYPES[name.rpartition(".")[2]], headers=headers)


_DASHBOARD_DOC = (
    "Return the state of all pools and nodes. With `Accept: text/event-stream`, stream such states, one per second."
)


class WebRoutes:
    """The routes of the web page and its dashboard."""

    def __init__(self, feed: Dashboard, settings: GatewaySettings) -> None:
        self._feed = feed
        self._settings = settings
        self.router = APIRouter()
        self.router.add_api_route("/web/{name}", self.asset, methods=PROBE_METHODS, include_in_schema=False)
        self.router.add_api_route("/dashboard", self.dashboard, description=_DASHBOARD_DOC)

    async def asset(self, request: Request, name: str) -> Response:
        """Return a file of the web page."""
        if name not in _FILES:
            raise HTTPException(404, "the web page has no such file")
        return asset_response(request, name)

    async def dashboard(self, request: Request) -> Response:
        if EVENT_STREAM in request.headers.get("accept", ""):
            return _StateStream(self._feed, self._settings)
        return Response(await self._feed.state(), media_type="application/json", headers={"Vary": "Accept"})


class _StateStream(Response):
    """A response of server-sent events, one for each state."""

    def __init__(self, feed: Dashboard, settings: GatewaySettings) -> None:
        super().__init__()
        self._feed = feed
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send states until the viewer is gone or the feed ends."""
        silence_s = self._settings.keep_alive_s
        with self._feed.viewer(), contextlib.suppress(CallerGoneError):
            writer = EventWriter(send)
            watch = writer.watch(
                first_wait_s=silence_s, interval_s=silence_s, send_timeout_s=self._settings.send_timeout_s
            )
            await while_connected(self._send(writer), until_disconnected(receive), watch)

    async def _send(self, writer: EventWriter) -> None:
        async for state in self._feed.states():
            await writer.write(b"data: " + state + b"\n\n")
        await writer.end()


def _routes(services: Services) -> list[BaseRoute | APIRouter]:
    feed = Dashboard(services.client, services.metrics, services.stopping)
    return [RouteIf("/", _page, wants_page), WebRoutes(feed, services.settings).router]


WEB = HttpDialect(_routes, public_paths={"/", *ASSET_PATHS})
