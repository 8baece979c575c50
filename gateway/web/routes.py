"""`GET /web/FILE`, the files of the web page, and `GET /dashboard`, the state that its dashboard shows."""

from __future__ import annotations

import contextlib
import hashlib
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from penstock.gateway.route_doc import PROBE_METHODS
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.flow import until_disconnected, while_connected
from penstock.gateway.stream.framing import EVENT_STREAM
from penstock.gateway.stream.writer import CallerGoneError, EventWriter
from penstock.gateway.web.dashboard import Dashboard

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
    for path in files("penstock.gateway.web").joinpath(folder).iterdir()
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
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A browser asks each time, and gets a 304 until the gateway is updated.
    "Cache-Control": "no-cache",
}


def wants_page(request: Request) -> bool:
    """Return whether a request accepts HTML, as those of browsers do."""
    return "text/html" in request.headers.get("accept", "").lower()


def asset_response(request: Request, name: str) -> Response | None:
    """Return the answer with one of the page's files, or None if the page has no such file."""
    content = _FILES.get(name)
    if content is None:
        return None
    headers = _HEADERS | {"ETag": _ETAGS[name]} | ({"Vary": "Accept"} if name == PAGE else {})
    if request.headers.get("if-none-match") == _ETAGS[name]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=_TYPES[name.rpartition(".")[2]], headers=headers)


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
        answer = asset_response(request, name)
        if answer is None:
            raise HTTPException(404, "the web page has no such file")
        return answer

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
