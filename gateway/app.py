"""The gateway's ASGI app and the server process that runs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI
from starlette.routing import Route

from penstock.gateway import health, metrics, usage
from penstock.gateway.anthropic import routes as anthropic_routes
from penstock.gateway.anthropic.errors import ID_HEADER as ANTHROPIC_ID_HEADER
from penstock.gateway.api_docs.page import ApiDocs
from penstock.gateway.api_docs.page import router as api_docs_router
from penstock.gateway.budget import SharedBudget
from penstock.gateway.embeddings import routes as embedding_routes
from penstock.gateway.errors import install_error_handlers
from penstock.gateway.http.entry import Entry, is_closed_without_keys, tell_without_keys
from penstock.gateway.http.listen_address import check_address
from penstock.gateway.http.middleware import (
    END_GRACE_S,
    TRACE_HEADER,
    AccessLog,
    Cors,
    Drain,
    HeadRequests,
    TracedRequests,
    allows_any_page,
    check_origins,
    cut_off_after,
)
from penstock.gateway.http.protocol import BoundedHead
from penstock.gateway.http.socket_protocol import PING_INTERVAL_S, PING_TIMEOUT_S, BoundedSocket
from penstock.gateway.jobs import routes as job_routes
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.openai import routes
from penstock.gateway.openai import routes as openai_routes
from penstock.gateway.openai.errors import ID_HEADER
from penstock.gateway.request.reading import BODY_STEP_BYTES, MAX_BODY_BYTES_HELD, MAX_BODY_BYTES_HELD_OF_TENANT, Parser
from penstock.gateway.responses import routes as response_routes
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.answer import IGNORED_HEADER, JOB_HEADER, MAX_TOKENS_HEADER
from penstock.gateway.tokens import routes as tokens_routes
from penstock.gateway.web import routes as web_routes
from penstock.gateway.web.dashboard import Dashboard
from penstock.gateway.websocket.handshake import ADVICE_ROUTE, SOCKET_ROUTE, SocketCounter, SubprotocolKey
from penstock.producer.client import AsyncClient, ClientSettings
from penstock.runtime.cooperative import LoopYielder
from penstock.runtime.file_descriptors import DescriptorWatch
from penstock.runtime.gc_freeze import freeze_gc, make_full_collections_rare
from penstock.runtime.loop_watch import LoopWatch
from penstock.runtime.process_memory import keep_large_blocks_apart
from penstock.runtime.settings import KeySettings
from penstock.runtime.stall_guard import StallGuard
from penstock.runtime.tracing.setup import tracing_of

MAX_RESULT_BYTES_HELD = 64 << 20
"""Bytes of large results and of records of responses that a gateway holds while it sends them. Others wait."""
MAX_RESULT_BYTES_HELD_OF_TENANT = 16 << 20
"""The share of MAX_RESULT_BYTES_HELD that one tenant may use. As much is reserved for answers that hold the record of a
response and need their result, too."""
MAX_RESULT_WAIT_S = 30.0
"""Seconds that an answer waits for that memory. After that, it is refused with a 503."""
ROUTES = (
    *openai_routes.ROUTES,
    *anthropic_routes.ROUTES,
    *response_routes.ROUTES,
    *job_routes.ROUTES,
    *tokens_routes.ROUTES,
    *embedding_routes.ROUTES,
)
"""The routes that take a body. They are plain Starlette routes, not FastAPI's."""
_PATHS = frozenset(route.path for route in ROUTES)
ROUTERS = (
    *(routes.router, health.router, metrics.router, usage.router),
    *(response_routes.router, job_routes.router, api_docs_router, web_routes.router),
)
"""FastAPI's routes."""
PROGRESS_VARIABLE = "PENSTOCK_GATEWAY_PROGRESS"
"""Environment variable. With the value `json`, the gateway prints its URL to stdout as JSON for a supervisor."""


def _client_of(settings: GatewaySettings) -> AsyncClient:
    return AsyncClient(settings.redis_url, settings=ClientSettings.load(name="gateway"))


def _add_state(app: FastAPI, settings: GatewaySettings) -> None:
    """Store on the app the objects that all requests share."""
    app.state.settings = settings
    app.state.metrics = GatewayMetrics()
    app.state.dashboard = Dashboard(lambda: app.state.client, app.state.metrics)
    app.state.parser = Parser(settings.unknown_fields)
    app.state.loop_watch = LoopWatch(interval_s=settings.loop_watch_ms / 1000, names_holders=settings.loop_debug)
    app.state.body_budget = SharedBudget(
        MAX_BODY_BYTES_HELD, per_owner=MAX_BODY_BYTES_HELD_OF_TENANT, step=BODY_STEP_BYTES, most=settings.max_body_bytes
    )
    app.state.yielder = LoopYielder()
    app.state.sockets = SocketCounter(settings.max_sockets, settings.max_key_sockets)
    app.state.result_budget = SharedBudget(
        MAX_RESULT_BYTES_HELD, per_owner=MAX_RESULT_BYTES_HELD_OF_TENANT, max_wait_s=MAX_RESULT_WAIT_S, has_reserve=True
    )


def create_app(settings: GatewaySettings) -> FastAPI:
    """Return the ASGI app. Its lifespan owns the gateway's only queue client."""
    tracing = tracing_of(settings.otlp_traces_endpoint, "penstock-gateway")

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with _client_of(settings) as client:
            app.state.client = client
            await tell_without_keys(client, settings)
            app.state.loop_watch.start()
            descriptors, guard = DescriptorWatch(), StallGuard(settings.loop_stall_s)
            descriptors.start()
            guard.start()
            try:
                yield
            finally:
                guard.stop()
                descriptors.stop()
                app.state.loop_watch.stop()
                await app.state.parser.close()
                if tracing is not None:
                    await asyncio.to_thread(tracing.close)

    # FastAPI's own document would lack the routes that take a body.
    app = FastAPI(title="penstock", lifespan=lifespan, openapi_url=None)
    _add_state(app, settings)
    install_error_handlers(app)
    _add_routes(app)
    _add_middleware(app, settings)
    if tracing is not None:
        app.add_middleware(TracedRequests, tracer=tracing.tracer, paths=_PATHS)
    return app


def _add_routes(app: FastAPI) -> None:
    app.router.routes.extend((*ROUTES, SOCKET_ROUTE, ADVICE_ROUTE))
    for router in ROUTERS:
        app.include_router(router)
    app.state.api_docs = ApiDocs(_all_routes())


def _add_middleware(app: FastAPI, settings: GatewaySettings) -> None:
    """Add the middleware from the innermost to the outermost."""
    app.add_middleware(HeadRequests)
    app.add_middleware(Entry, settings=settings, pepper=KeySettings.load().key_pepper)
    app.add_middleware(SubprotocolKey)
    app.add_middleware(Drain)
    needs_keys = is_closed_without_keys(settings) and not settings.allow_anonymous
    check_origins(settings.cors_origins, needs_keys=needs_keys)
    if settings.cors_origins:
        app.add_middleware(
            Cors,
            origins=settings.cors_origins,
            methods=sorted({method for route in _all_routes() for method in route.methods or ()}),
            exposed=[
                JOB_HEADER,
                ID_HEADER,
                ANTHROPIC_ID_HEADER,
                IGNORED_HEADER,
                MAX_TOKENS_HEADER,
                "Retry-After",
                "Retry-After-Ms",
                TRACE_HEADER,
            ],
        )
    app.add_middleware(AccessLog, paths=_PATHS)


def _all_routes() -> list[Route]:
    return [*ROUTES, *(route for router in ROUTERS for route in router.routes if isinstance(route, Route))]


IDLE_S = 75
"""Seconds that a connection may stay idle between two requests. The client must close an idle connection first;
otherwise it may send a request just as the server closes. Clients and proxies such as nginx close within 60 s."""


class _Server(uvicorn.Server):
    """A uvicorn server that can print its URL to stdout and cuts off open answers at the end of the drain.

    With port 0 the operating system chooses the port, so a supervisor can only learn it from that line.
    """

    def __init__(self, config: uvicorn.Config, *, drain_s: int, dashboard: Dashboard) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._dashboard = dashboard

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if os.environ.get(PROGRESS_VARIABLE) == "json":
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(json.dumps({"event": "ready", "url": f"http://{shown}:{port}"}), flush=True)  # noqa: T201

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._dashboard.stop()
        # uvicorn's own graceful-shutdown timeout would log a traceback for each open answer.
        end = asyncio.create_task(cut_off_after(self._drain_s, self.server_state.tasks))
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()


MAX_CONNECTIONS_PERCENT = 87
"""Percent of the open files that the system allows. The rest is for Redis, the log and the parser process."""
MIN_OTHER_FILES = 32
"""At least so many are the rest. An idle gateway has 19."""
MAX_CONNECTIONS = 1 << 20
"""The most connections where the system limits the number of open files of a process no further."""


def max_connections_of(settings: GatewaySettings) -> int:
    """Return the most connections that the gateway keeps open at once."""
    if settings.max_connections is not None:
        return settings.max_connections
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if max_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(max_files * MAX_CONNECTIONS_PERCENT // 100, max_files - MIN_OTHER_FILES))


def make_server(settings: GatewaySettings) -> uvicorn.Server:
    """Return the server of one gateway process. It is not started yet."""
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=BoundedHead,
        ws=BoundedSocket,
        ws_max_size=settings.max_body_bytes,
        ws_ping_interval=PING_INTERVAL_S,
        ws_ping_timeout=PING_TIMEOUT_S,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=settings.drain_s + END_GRACE_S,
        timeout_keep_alive=IDLE_S,
        # BoundedHead closes any connection beyond `max_connections`. So uvicorn's own refusal never applies.
        limit_concurrency=max_connections_of(settings) + 1,
    )
    return _Server(config, drain_s=settings.drain_s, dashboard=app.state.dashboard)


def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT, then let open answers continue for up to `drain_s`.

    Raises ConfigError if the gateway cannot listen on its address, and ConfigError or UnavailableError if it cannot
    reach Redis.
    """
    keep_large_blocks_apart()
    settings = asyncio.run(_checked_at_start(settings))
    server = make_server(settings)
    freeze_gc()
    make_full_collections_rare()
    # After the drain, uvicorn sends itself the signal that it received. Supervisors call an end by SIGTERM a failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.suppress(KeyboardInterrupt):
        server.run()


async def _checked_at_start(settings: GatewaySettings) -> GatewaySettings:
    """Check that the address is free and Redis answers. Return the settings that fit the API keys in Redis.

    This runs before uvicorn starts, because uvicorn would print its own start-up errors and hide the cause.
    """
    await check_address(settings.host, settings.port)
    async with _client_of(settings) as client:
        await client.warn_of_eviction()
        if allows_any_page(settings.cors_origins) and await client.api_keys():
            # The keys may be removed before the first request, so the gateway must not wait for it to see them.
            return settings.model_copy(update={"require_keys": True})
    return settings
