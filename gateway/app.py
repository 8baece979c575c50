"""The gateway's ASGI app, its health checks, and the server process that runs it.

`/health`: this process is up. `/ready`: Redis answers, a live node takes jobs, and answers reach this process.
`/health/nodes`: the pressure record of every live node, with its unhealthy parts and the reasons.
With several Redis, `/health` and `/ready` tell the state of each pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route, WebSocketRoute

from penstock.contract.errors import UnavailableError
from penstock.contract.pool import REDIS_STATES
from penstock.contract.tenant import are_required
from penstock.gateway.apis.anthropic.routes import ANTHROPIC
from penstock.gateway.apis.api_docs.routes import API_DOCS
from penstock.gateway.apis.batches.routes import BATCHES
from penstock.gateway.apis.files.routes import FILES
from penstock.gateway.apis.jobs.routes import JOBS
from penstock.gateway.apis.message_batches.routes import MESSAGE_BATCHES
from penstock.gateway.apis.openai.routes import OPENAI
from penstock.gateway.apis.responses.routes import RESPONSES
from penstock.gateway.apis.schedules.routes import SCHEDULES
from penstock.gateway.apis.tasks.routes import TASKS
from penstock.gateway.apis.usage.routes import USAGE
from penstock.gateway.apis.web.routes import WEB
from penstock.gateway.apis.webhooks.routes import WEBHOOKS
from penstock.gateway.apis.websocket.routes import WEBSOCKET
from penstock.gateway.budget import SharedBudget
from penstock.gateway.errors import ErrorHandlers, ErrorShapes, soon
from penstock.gateway.http.dialect import HttpDialect, Services
from penstock.gateway.http.entry import Entry, is_closed_without_keys, tell_without_keys
from penstock.gateway.http.middleware.access_log import AccessLog, log_unparsed
from penstock.gateway.http.middleware.cors import Cors, allows_any_page, check_origins
from penstock.gateway.http.middleware.drain import END_GRACE_S, Drain
from penstock.gateway.http.middleware.request_forms import HeadRequests, PlainPaths, SubprotocolKey
from penstock.gateway.http.middleware.traces import TRACE_HEADER, TracedRequests
from penstock.gateway.http.protocol import head_with_sockets
from penstock.gateway.http.server import GatewayServer
from penstock.gateway.http.socket_protocol import PING_INTERVAL_S, PING_TIMEOUT_S, BoundedSocket
from penstock.gateway.kept.connection import Keep
from penstock.gateway.metrics import GatewayMetrics, MetricsRoutes
from penstock.gateway.open_feeds import OpenFeeds
from penstock.gateway.redis_watch import REFUSING, RedisWatch
from penstock.gateway.request.parser_process import BodySchemas
from penstock.gateway.request.reading import BodyBudgets, Parser, RequestReader
from penstock.gateway.route_doc import PROBE_METHODS
from penstock.gateway.settings import GatewaySettings, check_address
from penstock.gateway.stream.answer import (
    IGNORED_HEADER,
    JOB_HEADER,
    MAX_TOKENS_HEADER,
    NOTICE_HEADER,
    Answers,
    WholeSender,
)
from penstock.producer.client import AsyncClient, ClientSettings
from penstock.producer.client.servers import QueueServer
from penstock.producer.files.service import Files
from penstock.producer.files.storage import FilesSettings
from penstock.queue.broker.producer import ServedPool
from penstock.runtime.event_loop import LoopYielder, cancel_until_done
from penstock.runtime.file_descriptors import DescriptorWatch
from penstock.runtime.kept_sockets import Inherited
from penstock.runtime.loop_watch import LoopWatch
from penstock.runtime.process_memory import freeze_gc, keep_large_blocks_apart, make_collections_rare, no_collection
from penstock.runtime.redis_source import tell_redis_source
from penstock.runtime.settings import KeySettings
from penstock.runtime.stack_dump import offer_stacks
from penstock.runtime.stall_guard import StallGuard
from penstock.runtime.tracing.setup import tracing_of

if TYPE_CHECKING:
    from penstock.runtime.tracing.export import Tracing


READY = "ready"


class HealthRoutes:
    """The routes of the health checks."""

    def __init__(self, client: AsyncClient, watch: RedisWatch) -> None:
        self._client = client
        self._watch = watch
        self.router = APIRouter()
        self.router.add_api_route("/health", self.health, methods=PROBE_METHODS)
        self.router.add_api_route("/health/nodes", self.nodes)
        self.router.add_api_route("/ready", self.ready, methods=PROBE_METHODS)

    async def health(self) -> dict[str, Any]:
        """Return that the process is up. Redis does not count: restarting this process would not bring it back.

        Of several Redis, it tells which ones answer.
        """
        servers = self._client.servers
        if not servers.is_split:
            return {"status": "ok"}
        pools = {pool: _state_of(server) for pool, server in servers.named.items()}
        return {"status": "ok", "directory": _state_of(servers.directory), "pools": pools}

    async def nodes(self) -> dict[str, list[dict[str, Any]]]:
        """Return the pressure records of the live nodes by pool. Raises UnavailableError while Redis is unreachable.

        Pools of one of several Redis that is away are missing.
        """
        async with soon():
            pools = self._reachable(await self._client.pools())
            pressures = {pool: await self._client.pressure(pool) for pool in pools}
        return {pool: [asdict(node) for node in pressure.nodes] for pool, pressure in pressures.items()}

    async def ready(self) -> dict[str, Any]:
        """Return that a request would be served now, by one pool at least; otherwise raise UnavailableError (HTTP 503).

        A problem of Redis and what is paused have their names in the answer. Of several Redis, it tells which pools are
        served.
        """
        if not self._client.is_alive:
            raise UnavailableError("this gateway no longer receives messages from the queue", code="inbox_ended")
        problem = self._watch.problem
        if problem in REFUSING and not self._client.servers.is_split:
            raise UnavailableError(f"Redis is unreachable: {REDIS_STATES[problem]} ({problem})", code="redis_away")
        async with soon():
            # A gateway often starts a moment before its first node, so a copy without nodes is fetched anew.
            for renewed in (False, True):
                states = await self._states(await self._client.pools(renewed=renewed))
                if READY in states.values():
                    named: dict[str, Any] = {"redis": problem} if problem else {}
                    if paused := await self._paused(states):
                        named["paused"] = paused
                    return {"status": READY, **named, **({"pools": states} if self._client.servers.is_split else {})}
        raise UnavailableError("no pool has a live node", code="no_node")

    async def _states(self, pools: Mapping[str, ServedPool]) -> dict[str, str]:
        """Return whether each pool is ready, or why not. With one Redis, the first that is ready suffices."""
        servers = self._client.servers
        states = dict.fromkeys((*pools, *servers.named), "redis_away")
        for pool in self._reachable(states):
            nodes = (await self._client.pressure(pool)).nodes if pool in pools and pools[pool].is_alive else ()
            states[pool] = READY if any(node.takes_jobs for node in nodes) else "no_node"
            if states[pool] == READY and not servers.is_split:
                break
        return states

    async def _paused(self, pools: Iterable[str]) -> list[str]:
        """Return what is paused of pools whose Redis answers. It is public, so a tenant has no name there."""
        asked = self._client.servers.grouped(self._reachable(pools))
        found = [pause for server, some in asked for pause in await server.steering.paused(some)]
        words = ((one.pool, "a tenant" if one.tenant is not None else one.words) for one in found)
        return [f"{pool}: {what}" for pool, what in dict.fromkeys(words)]

    def _reachable(self, pools: Iterable[str]) -> list[str]:
        """Return the pools whose Redis is not away."""
        servers = self._client.servers
        if not servers.is_split:
            return [*pools]
        reachable = servers.reachable
        return [pool for server, some in servers.grouped(pools) if server in reachable for pool in some]


def _state_of(server: QueueServer) -> str:
    return "redis_away" if server.is_away else "ok"


DIALECTS: tuple[HttpDialect, ...] = (
    JOBS,
    OPENAI,
    ANTHROPIC,
    RESPONSES,
    TASKS,
    FILES,
    BATCHES,
    MESSAGE_BATCHES,
    SCHEDULES,
    WEBHOOKS,
    WEBSOCKET,
    USAGE,
    WEB,
    API_DOCS,
)
"""The APIs of this gateway: a row for each folder in `apis/`."""
MAX_RESULT_BYTES_HELD = 64 << 20
"""Bytes of large results and of records of responses that a gateway holds while it sends them. Others wait."""
MAX_RESULT_BYTES_HELD_OF_TENANT = 16 << 20
"""The share of MAX_RESULT_BYTES_HELD that one tenant may use. As much is reserved for answers that hold the record of a
response and need their result, too."""
MAX_KEPT_REQUESTS_MIB = 64
"""MiB of requests that a gateway keeps for submitting open jobs again that Redis lost (`max_kept_mib` of a client)."""
MAX_RESULT_WAIT_S = 30.0
"""Seconds that an answer waits for that memory. After that, it is refused with a 503."""


def _make_client(settings: GatewaySettings) -> AsyncClient:
    own = ClientSettings.load(name="gateway")
    if "max_kept_mib" not in own.model_fields_set:
        own = own.model_copy(update={"max_kept_mib": MAX_KEPT_REQUESTS_MIB})
    return AsyncClient(settings.redis_url, settings=own)


@dataclass(frozen=True, slots=True)
class Gateway:
    """The app, with what its server needs beside it."""

    app: FastAPI
    stopping: asyncio.Event
    """Ends the app's endless streams when the server process stops."""
    client: AsyncClient
    metrics: GatewayMetrics


def create_app(settings: GatewaySettings, client: AsyncClient | None = None) -> FastAPI:
    """Return the ASGI app of a gateway."""
    return create_gateway(settings, client).app


def create_gateway(settings: GatewaySettings, client: AsyncClient | None = None) -> Gateway:
    """Build the gateway from its parts. Its only queue client connects in the app's lifespan."""
    client = client or _make_client(settings)
    metrics, yielder, open_feeds = GatewayMetrics(), LoopYielder(), OpenFeeds()
    errors = ErrorShapes([api.errors for api in DIALECTS if api.errors is not None])
    parser = Parser(settings.unknown_fields, schemas_of(DIALECTS))
    body_budgets = BodyBudgets(settings.max_body_bytes)
    result_budget = SharedBudget(
        MAX_RESULT_BYTES_HELD, per_owner=MAX_RESULT_BYTES_HELD_OF_TENANT, max_wait_s=MAX_RESULT_WAIT_S, has_reserve=True
    )
    sender = WholeSender(settings, metrics, yielder, result_budget)
    services = Services(
        client=client,
        settings=settings,
        metrics=metrics,
        errors=errors,
        parser=parser,
        reader=RequestReader(settings, parser, body_budgets),
        answers=Answers(client, settings, metrics, yielder, sender),
        sender=sender,
        result_budget=result_budget,
        open_feeds=open_feeds,
        yielder=yielder,
        files=Files(FilesSettings.load(), client.files),
        apis=DIALECTS,
    )
    loop_watch = LoopWatch(interval_s=settings.loop_watch_ms / 1000, names_holders=settings.loop_debug)
    tracing = tracing_of(settings.otlp_traces_endpoint, "penstock-gateway")
    budgets = [body_budgets.large, body_budgets.small]
    watch = RedisWatch(client, metrics.missing_rights)
    core = [
        HealthRoutes(client, watch).router,
        MetricsRoutes(client, metrics, loop_watch, budgets, result_budget, open_feeds, watch).router,
    ]

    # FastAPI's own document would lack the routes that take a body.
    lifespan = partial(_lifespan, services=services, loop_watch=loop_watch, tracing=tracing, watch=watch)
    app = FastAPI(title="penstock", lifespan=lifespan, openapi_url=None)
    ErrorHandlers(errors, metrics.refused).install(app)
    routes = _add_routes(app, services, core)
    _add_middleware(app, services, routes)
    if tracing is not None:
        app.add_middleware(TracedRequests, tracer=tracing.tracer, paths=_paths_of(routes))
    app.add_middleware(PlainPaths)
    return Gateway(app, services.stopping, client, metrics)


def schemas_of(apis: Sequence[HttpDialect]) -> BodySchemas:
    """Return the schemas of all bodies of these APIs."""
    return BodySchemas(
        [schema for api in apis for schema in api.bodies],
        {path: schema for api in apis for path, schema in api.socket_bodies.items()},
        {url: held.schema for api in apis for url, held in api.job_bodies.items()},
    )


@contextlib.asynccontextmanager
async def _lifespan(
    _: FastAPI, *, services: Services, loop_watch: LoopWatch, tracing: Tracing | None, watch: RedisWatch
) -> AsyncIterator[None]:
    client, settings = services.client, services.settings
    async with client:
        if settings.redis_url is not None:  # otherwise the caller has made the client
            tell_redis_source(settings.redis_url, "gateway")
        await tell_without_keys(client, settings)
        loop_watch.start()
        descriptors, guard = DescriptorWatch(), StallGuard(settings.loop_stall_s)
        descriptors.start()
        guard.start()
        background = {name: run for api in services.apis for name, run in api.background.items()}
        tasks = [
            asyncio.create_task(client.control.keep_continuing(), name="penstock bulk actions"),
            asyncio.create_task(watch.run(), name="penstock looks at Redis"),
            *(asyncio.create_task(run(services), name=name) for name, run in background.items()),
        ]
        try:
            yield
        finally:
            await cancel_until_done(tasks)
            services.files.close()
            guard.stop()
            descriptors.stop()
            loop_watch.stop()
            await services.parser.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)


def _add_routes(app: FastAPI, services: Services, core: Sequence[APIRouter]) -> list[Route]:
    """Add all routes: those that take a body, WebSockets, and those of FastAPI. Return all but the WebSockets."""
    found = [route for api in services.apis for route in api.routes(services)]
    plain = [route for route in found if isinstance(route, BaseRoute)]
    of_routers = _routes_in([*(route for route in found if isinstance(route, APIRouter)), *core])
    # `include_router` would build each route once more, during the first request.
    app.router.routes.extend((*plain, *of_routers))
    return [*(route for route in plain if isinstance(route, Route)), *of_routers]


def _routes_in(routers: Sequence[APIRouter]) -> list[Route]:
    return [route for router in routers for route in router.routes if isinstance(route, Route)]


def _paths_of(routes: Sequence[Route]) -> frozenset[str]:
    """Return the paths of the plain Starlette routes. FastAPI reports its own."""
    return frozenset(route.path for route in routes if not isinstance(route, APIRoute) and route.include_in_schema)


def _add_middleware(app: FastAPI, services: Services, routes: Sequence[Route]) -> None:
    """Add the middleware from the innermost to the outermost."""
    settings, metrics, errors = services.settings, services.metrics, services.errors
    app.add_middleware(HeadRequests)
    app.add_middleware(
        Entry,
        settings=settings,
        pepper=KeySettings.load().key_pepper,
        client=services.client,
        metrics=metrics,
        errors=errors,
        public_paths=services.public_paths,
    )
    app.add_middleware(SubprotocolKey)
    app.add_middleware(Drain, errors=errors, metrics=metrics)
    _add_cors(app, settings, errors, routes)
    paths = _paths_of(routes)
    app.add_middleware(AccessLog, metrics=metrics, errors=errors, paths=paths, logs_starts=settings.log_starts)


def _add_cors(app: FastAPI, settings: GatewaySettings, errors: ErrorShapes, routes: Sequence[Route]) -> None:
    needs_keys = is_closed_without_keys(settings) and not settings.allow_anonymous
    check_origins(settings.cors_origins, needs_keys=needs_keys)
    if settings.cors_origins:
        exposed = [JOB_HEADER, *errors.all_id_headers, IGNORED_HEADER, MAX_TOKENS_HEADER, NOTICE_HEADER, "Retry-After"]
        app.add_middleware(
            Cors,
            origins=settings.cors_origins,
            methods=sorted({method for route in routes for method in route.methods or ()}),
            exposed=[*exposed, "Retry-After-Ms", TRACE_HEADER, *chain(*(api.exposed_headers for api in DIALECTS))],
        )


MAX_CONNECTIONS_PERCENT = 87
"""Percent of the open files that the system allows. The rest is for Redis, the log and the parser process."""
MIN_OTHER_FILES = 32
"""At least so many are the rest. An idle gateway has 19."""
MAX_CONNECTIONS = 1 << 20
"""The most connections where the system limits the number of open files of a process no further."""


def choose_max_connections(settings: GatewaySettings) -> int:
    """Return the most connections that the gateway keeps open at once."""
    if settings.max_connections is not None:
        return settings.max_connections
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if max_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(max_files * MAX_CONNECTIONS_PERCENT // 100, max_files - MIN_OTHER_FILES))


def make_server(settings: GatewaySettings, keep: Keep | None = None) -> uvicorn.Server:
    """Return the server of one gateway process. It is not started yet. `keep`: what holds its connections, too."""
    gateway = create_gateway(settings)
    if keep is not None:
        gateway.metrics.watch_keep(keep)
    sockets = (route.path for route in gateway.app.routes if isinstance(route, WebSocketRoute))
    config = uvicorn.Config(
        gateway.app,
        host=settings.host,
        port=settings.port,
        http=head_with_sockets(sockets, partial(log_unparsed, gateway.metrics), keep),
        ws=BoundedSocket,
        ws_max_size=settings.max_body_bytes,
        ws_ping_interval=PING_INTERVAL_S,
        ws_ping_timeout=PING_TIMEOUT_S,
        log_config=None,
        access_log=False,
        server_header=False,
        # A browser must not take a stored file or a JSON text for a page.
        headers=[("X-Content-Type-Options", "nosniff")],
        timeout_graceful_shutdown=math.ceil(settings.drain_s) + END_GRACE_S,
        timeout_keep_alive=settings.idle_connection_s,
        # BoundedHead closes any connection beyond `max_connections`. So uvicorn's own refusal never applies.
        limit_concurrency=choose_max_connections(settings) + 1,
    )

    def note_stop() -> None:
        gateway.stopping.set()
        gateway.client.servers.note_stop()

    return GatewayServer(config, drain_s=settings.drain_s, note_stop=note_stop, metrics=gateway.metrics, keep=keep)


def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT, then let open answers continue for up to `drain_s`.

    Raises ConfigError if the gateway cannot listen on its address, and ConfigError or UnavailableError if it cannot
    reach Redis.
    """
    keep_large_blocks_apart()
    offer_stacks()
    inherited = Inherited.of_environment()
    with no_collection():
        settings = asyncio.run(_checked_at_start(settings, has_listener=inherited is not None))
        keep = None if inherited is None else Keep(inherited)
        server = make_server(settings, keep)
    sockets = None if inherited is None else [socket.socket(fileno=number) for number in inherited.listeners]
    freeze_gc()
    make_collections_rare()
    # After the drain, uvicorn sends itself the signal that it received. Supervisors call an end by SIGTERM a failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets)


async def _checked_at_start(settings: GatewaySettings, *, has_listener: bool) -> GatewaySettings:
    """Check that the address is free and Redis answers. Return the settings that fit the API keys in Redis.

    This runs before uvicorn starts, because uvicorn would print its own start-up errors and hide the cause.
    """
    if not has_listener:
        await check_address(settings.host, settings.port)
    async with _make_client(settings) as client:
        await client.warn_of_eviction()
        if allows_any_page(settings.cors_origins) and are_required(await client.api_keys()):
            # The keys may be removed before the first request, so the gateway must not wait for it to see them.
            return settings.model_copy(update={"require_keys": True})
    return settings
