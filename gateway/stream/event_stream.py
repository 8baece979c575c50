"""The base of the HTTP responses that read jobs, and of those that stream events."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from functools import partial

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import PenstockError
from penstock.gateway.http.direct_body import direct_body_of
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.shared_budget import SharedBudget
from penstock.gateway.stream.caller import CallerGoneError, until_disconnected, while_connected
from penstock.gateway.stream.dialect import StreamEncoder
from penstock.gateway.stream.flow import Batch, is_large
from penstock.gateway.stream.framing import framing_of, note_broken_event
from penstock.gateway.stream.keep_alive import waiting_comment
from penstock.gateway.stream.sse import KEEP_ALIVE, EventWriter
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.runtime.cooperative import LoopYielder


class JobResponse(Response):
    """A response about jobs. Called as an ASGI app, it raises a PenstockError only if nothing has been sent yet."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self._client: AsyncClient = request.app.state.client
        self._settings: GatewaySettings = request.app.state.settings
        self._metrics: GatewayMetrics = request.app.state.metrics
        self._yielder: LoopYielder = request.app.state.yielder
        self._result_budget: SharedBudget = request.app.state.result_budget


class EventStream(JobResponse):
    """A response of events. It sends keep-alives while it is silent, and reports an error as its last event."""

    @property
    def _comment(self) -> bytes:
        """The comment that a silent stream sends if it has no `_keep_alive`."""
        return KEEP_ALIVE

    @property
    def _keep_alive(self) -> bytes | None:
        """The bytes that a silent stream sends. None: `_comment`, with the position of a waiting job."""
        return None

    @property
    def _is_new(self) -> bool:
        """Whether the stream begins with its job's first token."""
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the stream ends or the caller leaves."""
        settings, keep_alive = self._settings, self._keep_alive or self._comment
        writer = EventWriter(send, framing_of(scope), keep_alive=keep_alive, body=direct_body_of(scope))
        watch = writer.watch(
            first_wait_s=settings.first_chunk_wait_s,
            interval_s=settings.keep_alive_s,
            send_timeout_s=settings.send_timeout_s,
        )
        with contextlib.suppress(CallerGoneError), self._metrics.stream(is_measured=self._is_new) as self._meter:
            try:
                await while_connected(self._answer(writer), until_disconnected(receive), watch)
            except asyncio.CancelledError:
                if writer.is_within_event:
                    note_broken_event(scope)
                raise

    async def _answer(self, writer: EventWriter) -> None:
        try:
            await self._send_events(writer)
        except PenstockError as error:
            if not writer.started:
                raise
            self._metrics.refused(error)
            if writer.is_within_event:
                # No reader can tell an error from the rest of that event. The server closes the connection instead.
                raise CallerGoneError from error
            await writer.fail(error, self._error_event(error))
        await writer.end()

    @abstractmethod
    async def _send_events(self, writer: EventWriter) -> None:
        """Send all events of a stream that does not fail."""

    @abstractmethod
    def _error_event(self, error: PenstockError) -> bytes:
        """Return the last event of a stream that fails after it has begun."""

    def _show_position(self, job: AsyncJob, writer: EventWriter) -> None:
        """Add the job's queue position to the stream's comments until the first chunk."""
        if self._keep_alive is None:
            writer.keep_alive_source = partial(waiting_comment, job, self._comment)

    async def _write(self, encoder: StreamEncoder, batch: Batch, writer: EventWriter) -> None:
        slows_others = is_large(batch)
        writer.keep_alive_source = None
        if slows_others:
            await self._yielder.wait()
        for events in encoder.parts_of(batch):
            await writer.write(events)
            self._meter.sent()
            if slows_others:
                await self._yielder.wait()
