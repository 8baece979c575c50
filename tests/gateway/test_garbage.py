"""Ended streams leave few objects to the garbage collector, whose passes would delay all other streams."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from fakes.waiting import wait_until

from tests.gateway.conftest import EchoEngine

NUM_STREAMS = 5
OF_STREAMS = {
    "RequestResponseCycle",
    "DirectBody",
    "EventWriter",
    "EventSink",
    "StreamReader",
    "Mailbox",
    "StreamAnswer",
}


@pytest.fixture
def garbage() -> Iterator[list[object]]:
    """Return the objects that only the garbage collector frees."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def read(url: str, *, max_events: int | None = None) -> int:
    """Read a stream, or only its first events; return their number."""
    body = {"model": "acme/echo", "messages": [{"role": "user", "content": "x" * 40}], "stream": True}
    num_events = 0
    with suppress(httpx.ReadError), httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            num_events += line.startswith("data: {") and bool(json.loads(line[6:]))
            if num_events == max_events:
                break
    return num_events


def test_ended_streams_leave_no_circular_garbage(url: str, engine: EchoEngine, garbage: list[object]) -> None:
    engine.step_s = 0.005
    assert all(read(url) > 1 for _ in range(NUM_STREAMS))
    assert [read(url, max_events=3) for _ in range(NUM_STREAMS)] == [3] * NUM_STREAMS
    wait_until(lambda: "penstock_http_open_streams 0.0" in httpx.get(url + "/metrics", timeout=60).text)
    gc.collect()
    assert OF_STREAMS & {type(found).__name__ for found in garbage} == set()
