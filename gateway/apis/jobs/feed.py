"""`GET /v1/jobs/events`: the feed of completions, one endless stream of events, and cursors into it.

A caller sees only the jobs of its own tenant; others do not exist for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.contract.errors import PenstockError, RequestError
from penstock.contract.job_actions import MAX_POOL_CHARS
from penstock.gateway.errors import error_body, soon
from penstock.gateway.metrics import StreamMeter
from penstock.gateway.open_feeds import FeedPlace, OpenFeeds
from penstock.gateway.request.reading import AFTER, LAST_EVENT_HEADER, caller_of
from penstock.gateway.stream.answer import Answers
from penstock.gateway.stream.event_stream import EventSource
from penstock.gateway.stream.writer import EventWriter, event
from penstock.producer.client import AsyncClient
from penstock.producer.client.completions import Completion, CompletionCursor, CompletionFeed, FeedEvent, checked_tag
from penstock.producer.client.job_objects import completion_object
from penstock.runtime.event_loop import LoopYielder

_EVENTS_AT_ONCE = 64
_CURSOR_EVERY_S = 10.0
"""Seconds without an event after which a cursor is sent, if completions with other tags were passed meanwhile."""


class CompletionEvents(EventSource):
    """The completions behind a cursor as events. The id of each is the cursor behind it."""

    is_new = False

    def __init__(
        self,
        feed: CompletionFeed,
        open_feeds: OpenFeeds,
        start: CompletionCursor,
        tag: str | None,
        yielder: LoopYielder,
        stopping: asyncio.Event,
    ) -> None:
        """`stopping` ends the stream, because the gateway stops. Its cursor has been sent."""
        self._feed = feed
        self._open_feeds = open_feeds
        self._stopping = stopping
        self._start = start
        self._tag = tag
        self._yielder = yielder

    def error_event(self, error: PenstockError) -> bytes:
        """Return the last event of a stream that fails."""
        return event(error_body(error))

    async def send_events(self, writer: EventWriter, meter: StreamMeter) -> None:
        """Send the start as a cursor, then events until the caller leaves. Raises BusyError for too many streams."""
        with self._open_feeds.counting(self._start.tenant) as place:
            await self._send_pages(writer, place)

    async def _send_pages(self, writer: EventWriter, place: FeedPlace) -> None:
        sent = self._start
        await writer.write(_cursor_event(sent))
        sent_s = time.monotonic()
        async for page in self._feed.pages(sent, self._tag):
            if self._stopping.is_set():
                return
            for at in range(0, len(page.events), _EVENTS_AT_ONCE):
                part = page.events[at : at + _EVENTS_AT_ONCE]
                place.unsent_since_ms = next((e.item.finished_ms for e in part if isinstance(e.item, Completion)), None)
                await writer.write(b"".join(map(_event_of, part)))
                await self._yielder.wait()
            place.unsent_since_ms = None
            if page.events:
                sent, sent_s = page.events[-1].cursor, time.monotonic()
            elif page.cursor is not sent and time.monotonic() - sent_s >= _CURSOR_EVERY_S:
                sent, sent_s = page.cursor, time.monotonic()
                await writer.write(_cursor_event(sent))


def _event_of(one: FeedEvent) -> bytes:
    item = one.item
    if isinstance(item, Completion):
        shown = completion_object(item) | {"links": {"self": f"/v1/jobs/{item.job_id}"}}
    else:
        shown = {"object": "job.gap", "pool": item.pool, "reason": item.reason}
        shown |= {"from_ms": item.from_ms, "until_ms": item.until_ms}
    return event(shown, str(one.cursor))


def _cursor_event(cursor: CompletionCursor) -> bytes:
    return event(_cursor_object(cursor), str(cursor))


def _cursor_object(cursor: CompletionCursor) -> dict[str, Any]:
    return {"object": "job.cursor", "cursor": str(cursor)}


class FeedRoutes:
    """The routes of the completions of a caller's tenant."""

    def __init__(
        self,
        client: AsyncClient,
        answers: Answers,
        open_feeds: OpenFeeds,
        yielder: LoopYielder,
        stopping: asyncio.Event,
    ) -> None:
        """`stopping` ends all streams, because the gateway stops."""
        self._feed = client.feed
        self._answers = answers
        self._yielder = yielder
        self._open_feeds = open_feeds
        self._stopping = stopping
        self.router = APIRouter()
        self.router.add_api_route("/v1/jobs/events", self.events)
        self.router.add_api_route("/v1/jobs/events/cursor", self.cursor)

    async def events(self, request: Request) -> Response:
        """Stream the caller's jobs as they end, until the caller leaves or the gateway stops.

        Each event's id is the cursor at which to continue.

        `?after=` or `Last-Event-ID` (a cursor; by default the present end), `?tag=`, `?pool=`; `?tenant=` needs the
        scope `admin`. An event `job.gap` tells a reader that completions are gone which it has not read; the list of
        jobs has them.
        """
        tenant, params = _params_of(request, (AFTER, "tag", "pool"))
        after, pool = request.headers.get(LAST_EVENT_HEADER) or params.get(AFTER), params.get("pool")
        tag = checked_tag(params.get("tag"))
        start = CompletionCursor.parse(after, tenant, pool) if after else await self._end(tenant, pool)
        source = CompletionEvents(self._feed, self._open_feeds, start, tag, self._yielder, self._stopping)
        return self._answers.stream(source)

    async def cursor(self, request: Request) -> dict[str, Any]:
        """Return the cursor of the present end. Taken before jobs are submitted, it misses none of their ends.

        `?pool=`; `?tenant=` needs the scope `admin`.
        """
        tenant, params = _params_of(request, ("pool",))
        return _cursor_object(await self._end(tenant, params.get("pool")))

    async def _end(self, tenant: str, pool: str | None) -> CompletionCursor:
        async with soon():
            return await self._feed.cursor(tenant, pool)


def _params_of(request: Request, known: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the tenant and the other parameters of a request. Raises RequestError for a wrong or unknown one."""
    params, caller = dict(request.query_params), caller_of(request)
    tenant = params.pop("tenant", caller.tenant)
    if tenant != caller.tenant or "infer" not in caller.scopes:
        caller.require("admin")
    if len(params.get("pool", "")) > MAX_POOL_CHARS:
        raise RequestError(f"pool must have at most {MAX_POOL_CHARS} characters", param="pool")
    if unknown := sorted(params.keys() - set(known)):
        name, accepted = unknown[0][:64], ", ".join(known)
        raise RequestError(f"{name}: {request.url.path} accepts only {accepted} and tenant", param=name)
    return tenant, params
