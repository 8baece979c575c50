"""The web page at `/`, its files at `/web/FILE`, and `GET /dashboard`, the state that its dashboard shows."""

from __future__ import annotations

import contextlib

from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from penstock.gateway.apis.web.dashboard import Dashboard
from penstock.gateway.apis.web.page_files import ASSET_PATHS, FILES, PAGE, asset_response
from penstock.gateway.http.dialect import HttpDialect, RouteIf, Services
from penstock.gateway.route_doc import PROBE_METHODS
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.event_stream import until_disconnected, while_connected
from penstock.gateway.stream.writer import EVENT_STREAM, CallerGoneError, EventWriter

_DASHBOARD_DOC = (
    "Return the state of all pools and nodes. With `Accept: text/event-stream`, stream such states, one per second."
)


def wants_page(scope: Scope) -> bool:
    """Return whether a request accepts HTML, as those of browsers do. Others get what another API has at `/`."""
    return "text/html" in Headers(scope=scope).get("accept", "").lower()


async def _page(request: Request) -> Response:
    return asset_response(request, PAGE)


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
        if name not in FILES:
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
