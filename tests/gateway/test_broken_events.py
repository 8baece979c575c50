"""Streams that fail within a large event that the encoder yields in parts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.contract.errors import PenstockError, UnavailableError
from penstock.gateway.errors import ErrorShapes, error_body
from penstock.gateway.http.middleware.drain import Drain
from penstock.gateway.metrics import GatewayMetrics, StreamMeter
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.event_stream import EventSource, EventStream
from penstock.gateway.stream.writer import EventWriter, NdjsonFraming, event

WHOLE = event({"n": 1})
HALF = b'data: {"n":'


class TwoEvents(EventSource):
    """Yields a whole event and a part of the next one, then fails, or waits for a slow reader."""

    def __init__(self, part: bytes, *, fails: bool) -> None:
        self._part = part
        self._fails = fails
        self.has_sent = asyncio.Event()

    async def send_events(self, writer: EventWriter, meter: StreamMeter) -> None:
        await writer.write(WHOLE)
        await writer.write(self._part)
        self.has_sent.set()
        if self._fails:
            raise UnavailableError("Redis is away")
        await asyncio.sleep(60)

    def error_event(self, error: PenstockError) -> bytes:
        return event(error_body(error))


async def sent_by(source: TwoEvents) -> tuple[list[bytes], bool]:
    """Return what the stream sends until it fails or the gateway stops, and whether the body is complete."""
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        await asyncio.sleep(60)

    scope = {"type": "http", "path": "/v1/responses", "headers": [], "extensions": {}}
    stream = EventStream(source, GatewaySettings(), GatewayMetrics())
    answering = asyncio.create_task(Drain(stream, errors=ErrorShapes(), metrics=GatewayMetrics())(scope, receive, send))
    await source.has_sent.wait()
    await asyncio.sleep(0)
    answering.cancel()
    await asyncio.wait((answering,))
    parts = [message["body"] for message in messages if message["type"] == "http.response.body"]
    return parts, not messages[-1].get("more_body", False)


@pytest.mark.parametrize("fails", [True, False])
async def test_no_event_follows_a_part_of_an_event(fails: bool) -> None:
    parts, is_complete = await sent_by(TwoEvents(HALF, fails=fails))
    assert (parts, is_complete) == ([WHOLE, HALF], False)


@pytest.mark.parametrize("fails", [True, False])
async def test_an_error_follows_a_whole_event(fails: bool) -> None:
    parts, is_complete = await sent_by(TwoEvents(WHOLE, fails=fails))
    assert (parts[:2], is_complete) == ([WHOLE, WHOLE], True)
    code = b"unavailable" if fails else b"gateway_stopped"
    assert code in b"".join(parts[2:])


async def test_parts_of_a_large_event_are_passed_on_at_once() -> None:
    sizes: list[int] = []

    async def send(message: Any) -> None:
        sizes.append(len(message.get("body", b"")))

    writer = EventWriter(send, NdjsonFraming())
    part = b"x" * (64 << 10)
    await writer.write(b'event: a\ndata: {"text":"')
    for _ in range(100):
        await writer.write(part)
    await writer.write(b'"}\n\n')
    assert sum(sizes) == len(b'{"text":"') + 100 * len(part) + len(b'"}\n')
    assert max(sizes) == len(part)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_framing_of_parts_is_that_of_the_whole(size: int) -> None:
    events = [b'id: a:1\ndata: {"a":1}\n\n', b'event: b\ndata: {"b":"x: y"}\n\n', b"data: [DONE]\n\n", b": c\n\n"]
    whole = NdjsonFraming().events(b"".join(events))
    assert whole == b'{"event_id":"a:1","a":1}\n{"b":"x: y"}\n'
    # Encoders cut neither the lines before the data nor the end of an event.
    parts = [b'id: a:1\ndata: {"a"', b":1}\n\n", b"event: b\ndata: ", b'{"b":"x: ', b'y"}\n\n', *events[2:]]
    joined = [b"".join(parts[at : at + size]) for at in range(0, len(parts), size)]
    framing = NdjsonFraming()
    assert b"".join(map(framing.events, joined)) == whole
