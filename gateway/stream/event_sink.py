"""Delivery of tokens without waking their stream's task."""

from __future__ import annotations

from penstock.contract.output import Chunk
from penstock.gateway.stream.dialect import StreamEncoder
from penstock.gateway.stream.sse import EventWriter


class EventSink:
    """Sends the plain chunks of one job as events at once, while the task of the stream waits for chunks.

    A wake-up of the task would take longer than encoding and writing the event. See `ChunkSink`.
    """

    __slots__ = ("_encoder", "_writer")

    def __init__(self, encoder: StreamEncoder, writer: EventWriter) -> None:
        self._encoder = encoder
        self._writer = writer

    @property
    def is_ready(self) -> bool:
        """Whether the response has begun, and its reader keeps up."""
        return self._writer.is_ready

    def take(self, chunk: Chunk) -> None:
        """Send the events of the next chunk."""
        for events in self._encoder.parts_of((chunk,)):
            self._writer.write_now(events)
