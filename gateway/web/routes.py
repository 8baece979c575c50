"""`GET /web/FILE`, the files of the web page, and `GET /dashboard`, the state that its dashboard shows."""

from __future__ import annotations

import contextlib

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from penstock.gateway.health import PROBE_METHODS
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.caller import CallerGoneError, until_disconnected, while_connected
from penstock.gateway.stream.framing import EVENT_STREAM
from penstock.gateway.stream.sse import EventWriter
from penstock.gateway.web.assets import asset_response
from penstock.gateway.web.dashboard import Dashboard

router = APIRouter()


@router.api_route("/web/{name}", methods=PROBE_METHODS, include_in_schema=False)
async def asset(request: Request, name: str) -> Response:
    """Return a file of the web page."""
    answer = asset_response(request, name)
    if answer is None:
        raise HTTPException(404, "the web page has no such file")
    return answer


@router.get("/dashboard")
async def dashboard(request: Request) -> Response:
    """Return the state of all pools and nodes. With `Accept: text/event-stream`, stream such states, one per second."""
    feed: Dashboard = request.app.state.dashboard
    if EVENT_STREAM in request.headers.get("accept", ""):
        return _StateStream(feed, request.app.state.settings)
    return Response(await feed.state(), media_type="application/json", headers={"Vary": "Accept"})


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
