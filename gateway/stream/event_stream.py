"""An answer that is a stream of events, whatever they are read from.

It has a source, an encoder and a writer. The source reads jobs, the encoder of the dialect makes bytes of what it
reads, and the writer sends these. Nothing is sent until the source has the first chunk or a refusal, so that a refusal
gets a real HTTP status. The stream waits at most `first_chunk_wait_s` for that; then it sends status 200 and reports
errors as events.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from functools import partial

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import PenstockError
from penstock.gateway.metrics import GatewayMetrics, StreamMeter
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.dialect import StreamEncoder
from penstock.gateway.stream.flow import Batch, is_large, until_disconnected, waiting_comment, while_connected
from penstock.gateway.stream.framing import framing_of, note_broken_event
from penstock.gateway.stream.writer import KEEP_ALIVE, CallerGoneError, EventWriter, direct_body_of
from penstock.producer.client import AsyncJob
from penstock.runtime.event_loop import LoopYielder


class EventSource(ABC):
    """What a stream sends: it reads the events' content, and knows how they are encoded."""

    comment: bytes = KEEP_ALIVE
    """What a silent stream sends if there is no `keep_alive`: a comment, with the position of a waiting job."""
    keep_alive: bytes | None = None
    """What a silent stream sends instead of a comment."""
    is_new: bool = True
    """Whether the stream begins with its job's first token."""

    @abstractmethod
    async def send_events(self, writer: EventWriter, meter: StreamMeter) -> None:
        """Send all events of a stream that does not fail."""

    @abstractmethod
    def error_event(self, error: PenstockError) -> bytes:
        """Return the last event of a stream that fails after it has begun."""

    def show_position(self, job: AsyncJob, writer: EventWriter) -> None:
        """Add the job's queue position to the stream's comments until the first chunk."""
        if self.keep_alive is None:
            writer.keep_alive_source = partial(waiting_comment, job, self.comment)


class EventStream(Response):
    """A response of events. It sends keep-alives while it is silent, and reports an error as its last event.

    Called as an ASGI app, it raises a PenstockError only if nothing has been sent yet.
    """

    def __init__(self, source: EventSource, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        super().__init__()
        self._source = source
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the stream ends or the caller leaves."""
        source, settings = self._source, self._settings
        keep_alive = source.keep_alive or source.comment
        writer = EventWriter(send, framing_of(scope), keep_alive=keep_alive, body=direct_body_of(scope))
        watch = writer.watch(
            first_wait_s=settings.first_chunk_wait_s,
            interval_s=settings.keep_alive_s,
            send_timeout_s=settings.send_timeout_s,
        )
        with contextlib.suppress(CallerGoneError), self._metrics.stream(is_measured=source.is_new) as meter:
            try:
                await while_connected(self._answer(writer, meter), until_disconnected(receive), watch)
            except asyncio.CancelledError:
                if writer.is_within_event:
                    note_broken_event(scope)
                raise

    async def _answer(self, writer: EventWriter, meter: StreamMeter) -> None:
        try:
            await self._source.send_events(writer, meter)
        except PenstockError as error:
            if not writer.started:
                raise
            self._metrics.refused(error)
            if writer.is_within_event:
                # No reader can tell an error from the rest of that event. The server closes the connection instead.
                raise CallerGoneError from error
            await writer.fail(error, self._source.error_event(error))
        await writer.end()


class ChunkWriter:
    """Writes the chunks of one stream as events. While it writes many, other requests are served."""

    def __init__(self, encoder: StreamEncoder, writer: EventWriter, meter: StreamMeter, yielder: LoopYielder) -> None:
        self._encoder = encoder
        self._writer = writer
        self._meter = meter
        self._yielder = yielder

    async def write(self, batch: Batch) -> None:
        """Write the events of one job's next chunks."""
        slows_others = is_large(batch)
        self._writer.keep_alive_source = None
        if slows_others:
            await self._yielder.wait()
        for events in self._encoder.parts_of(batch):
            await self._writer.write(events)
            self._meter.sent()
            if slows_others:
                await self._yielder.wait()
