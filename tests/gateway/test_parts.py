"""Parts tested without HTTP: a blocked reader, and an exception in the gateway's own code."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.contract.errors import BusyError, ConflictError, JobFailedError, StreamDivergedError
from penstock.contract.job import SamplingParams
from penstock.contract.output import Chunk
from penstock.gateway.apis.openai.encoder import SseEncoder
from penstock.gateway.app import create_app
from penstock.gateway.errors import ErrorShape
from penstock.gateway.request.generation import GenerationRequest
from penstock.gateway.request.jobs import open_jobs
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.dialect import AnswerHead
from penstock.gateway.stream.event_stream import batches_of, until_disconnected, while_connected
from penstock.gateway.stream.writer import KEEP_ALIVE, CallerGoneError, EventWriter, event
from penstock.producer.client import AsyncClient
from penstock.producer.openai.render import ChatRenderer, CompletionRenderer
from penstock.producer.parsed_body import ParsedBody
from penstock.producer.parsing.parsed_text import PLAIN, ParsedText


class Ticks:
    """A clock that a test advances: by the duration of the next sleep."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.asleep = asyncio.Semaphore(0)
        self._over = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        self.asleep.release()
        await self._over.acquire()
        self.now_s += seconds

    async def next(self) -> None:
        """End the current sleep. Return once the next one has begun."""
        self._over.release()
        await self.asleep.acquire()

    def writer(self, send: Callable[[Any], Awaitable[None]]) -> EventWriter:
        return EventWriter(send, clock=lambda: self.now_s, sleep=self.sleep)


async def test_client_that_reads_nothing_is_disconnected():
    async def stuck(_: object) -> None:
        await ticks.asleep.acquire()
        while ticks.now_s < 1000:
            await ticks.next()

    ticks = Ticks()
    writer = ticks.writer(stuck)
    watch = writer.watch(first_wait_s=5, interval_s=10, send_timeout_s=60)
    with pytest.raises(CallerGoneError):
        await while_connected(writer.write(b"data: 1\n\n"), watch)
    assert ticks.now_s == 65


async def test_client_stuck_before_the_first_event_is_disconnected():
    async def stuck(_: object) -> None:
        await asyncio.sleep(60)

    watch = EventWriter(stuck).watch(first_wait_s=0, interval_s=0.01, send_timeout_s=0.05)
    with pytest.raises(CallerGoneError):
        await while_connected(asyncio.sleep(60), watch)


async def test_keep_alive_comments_are_sent_only_in_silence():
    sent: list[bytes] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message.get("body", b""))

    ticks = Ticks()
    writer = ticks.writer(send)

    async def talk_then_rest() -> None:
        await ticks.asleep.acquire()
        for _ in range(3):
            await writer.write(b"data: 1\n\n")
            await ticks.next()
        for _ in range(2):
            await ticks.next()

    await while_connected(talk_then_rest(), writer.watch(first_wait_s=0.4, interval_s=0.4, send_timeout_s=60))
    assert sent == [b"", *[b"data: 1\n\n"] * 3, *[KEEP_ALIVE] * 2]


async def test_work_is_canceled_and_cleaned_up_when_the_caller_disconnects():
    ended = []

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    with pytest.raises(CallerGoneError):
        await while_connected(work(), until_disconnected(receive))
    assert ended == [True]


class FakeJob:
    def __init__(self, *batches: list[Chunk] | Exception) -> None:
        self._batches = batches

    async def batches(self) -> AsyncIterator[list[Chunk]]:
        for batch in self._batches:
            if isinstance(batch, Exception):
                raise batch
            yield batch


async def test_one_job_that_cannot_be_read_ends_the_merged_flow():
    waits = FakeJob([Chunk("job:1", 0, text="a")], StreamDivergedError("rolled back"))
    with pytest.raises(StreamDivergedError):
        async for batch in batches_of([waits, FakeJob([Chunk("job:2", 0, text="b")])]):
            assert isinstance(batch, list)
            assert batch[0].text == {"job:1": "a", "job:2": "b"}[batch[0].job_id]


def test_an_event_is_one_line_of_ascii_whatever_it_carries():
    text = "a\nb\r\u2028\u2029\x85\x0b 🐢"
    raw = event({"text": text}, "job:1")
    assert raw.isascii()
    head, data = raw.decode().removesuffix("\n\n").splitlines()
    assert head == "id: job:1"
    assert json.loads(data.removeprefix("data: ")) == {"text": text}


@pytest.mark.parametrize("dialect", [ChatRenderer, CompletionRenderer])
@pytest.mark.parametrize("model", ["acme/echo", 'a "b" \\ c', "with \ue001 inside", "%b%d"])
@pytest.mark.parametrize("event_ids", [False, True])
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]))), include_usage=st.booleans(), counts=st.booleans()
)
def test_events_hold_the_renderers_pieces_whatever_the_text(dialect, model, event_ids, texts, include_usage, counts):
    chunks = [
        Chunk(
            *(f"job:{i % 2}", i, i % 3, i, (7,) * (i % 4), text),
            finish_reason="stop" if i == len(texts) - 1 else None,
            num_prompt_tokens=9 if i < 2 else None,
        )
        for i, text in enumerate(texts)
    ]
    fields = {
        "job_id": "job:0",
        "model": model,
        "created_s": 1,
        "params": SamplingParams(n=3),
        "include_usage": include_usage,
    }
    head = AnswerHead(
        ["job:0", "job:1"],
        model,
        1,
        fields["params"],
        PLAIN,
        options={"continuous_usage_stats": counts},
        event_ids=event_ids,
    )
    pieces, renderer = SseEncoder(dialect(**fields), head), dialect(**fields)
    num_tokens = [*accumulate(len(chunk.token_ids) for chunk in chunks)]

    def rendered(i: int, c: Chunk) -> bytes:
        piece = renderer.piece(i % 2, c.choice, ParsedText(c.text), c.finish_reason)
        if counts:
            so_far = i + len(c.token_ids)
            piece["usage"] = {"prompt_tokens": 9, "completion_tokens": so_far, "total_tokens": 9 + so_far}
        return event(piece, f"{c.job_id}:{i}:{num_tokens[i]}" if event_ids else "")

    expected = [rendered(i, c) for i, c in enumerate(chunks) if c.text or c.finish_reason]
    assert b"".join(pieces.parts_of(chunks)) == b"".join(expected)


def test_a_429_says_what_is_known_of_the_queue():
    waits = {"estimated_wait_ms": 9, "estimated_wait_p10_ms": 5, "estimated_wait_p90_ms": 20}
    error = BusyError("full", retry_after_ms=1, num_waiting_ahead=0, **waits)
    known = json.loads(ErrorShape().response(error, None).body)
    assert known["error"].items() >= {"num_waiting_ahead": 0, **waits}.items()
    unknown = json.loads(ErrorShape().response(BusyError("full", retry_after_ms=1), None).body)
    assert unknown["error"].keys() == {"message", "type", "param", "code", "retry_after_ms"}


@pytest.mark.parametrize(("retry_after_ms", "header"), [(1, "1"), (1000, "1"), (1001, "2"), (59_999, "60")])
def test_retry_after_is_whole_seconds_and_never_too_early(retry_after_ms, header):
    response = ErrorShape().response(BusyError("full", retry_after_ms=retry_after_ms), None)
    assert (response.status_code, response.headers["retry-after"]) == (429, header)


@pytest.mark.parametrize(
    ("error", "header"),
    [
        (ConflictError("another request"), "false"),
        (JobFailedError("its third node died of it", code="node_lost"), "false"),
        (JobFailedError("its node left with its weights", code="revision_gone"), None),
        (BusyError("full", retry_after_ms=1), None),
    ],
)
def test_clients_do_not_retry_permanent_errors(error, header):
    assert ErrorShape().response(error, None).headers.get("x-should-retry") == header


class FakeClient:
    """Accepts one job and records the gateway's calls for it."""

    def __init__(self, error: BaseException) -> None:
        self.calls: list[str] = []
        self._error = error
        self._num_jobs = 0

    async def submit_noting(self, prompt: str, options: object) -> FakeClient:
        self._num_jobs += 1
        if self._num_jobs > 1:
            raise self._error
        return self

    async def cancel(self) -> None:
        self.calls.append("cancel")

    async def detach(self) -> None:
        self.calls.append("detach")


@pytest.mark.parametrize("error", [BusyError("full", retry_after_ms=1), asyncio.CancelledError()])
@pytest.mark.parametrize(("key", "call"), [(None, "cancel"), ("again", "detach")])
async def test_jobs_with_an_idempotency_key_are_released_and_not_canceled(error, key, call):
    client = FakeClient(error)
    order = GenerationRequest(ParsedBody("m", ["a", "b"]), {"idempotency_key": key})
    with pytest.raises(type(error)):
        async with open_jobs(client, order):
            pass
    assert client.calls == [call]


async def test_a_bug_is_a_500_without_details(caplog):
    caplog.set_level(logging.INFO)

    class Broken:
        feed = control = files = batches = sets = None
        servers = SimpleNamespace(clock=SimpleNamespace(now_s=None))
        webhooks = SimpleNamespace(queue=None)
        schedules = SimpleNamespace(store=None)

        async def pools(self) -> None:
            raise ZeroDivisionError("s3cret")

    app = create_app(GatewaySettings(), cast("AsyncClient", Broken()))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        response, probed = await http.get("/v1/models"), await http.get("/ready")
    assert response.status_code == probed.status_code == 500
    assert (
        response.json()["error"]
        == probed.json()["error"]
        == {"message": "internal error", "type": "server_error", "param": None, "code": "internal_error"}
    )
    [logged] = [vars(r) for r in caplog.records if r.name == "penstock.gateway.access"]
    assert (logged["status"], logged["path"]) == (500, "/v1/models")
    assert response.headers["x-request-id"] == logged["request_id"]


async def test_client_is_not_disconnected_because_the_gateway_was_blocked():
    now_s, naps = 0.0, [5.0, 10.0, 500.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0]

    async def stuck(message):
        await asyncio.Event().wait()

    async def sleep(_: float) -> None:
        nonlocal now_s
        now_s += naps.pop(0)
        await asyncio.sleep(0)

    writer = EventWriter(stuck, clock=lambda: now_s, sleep=sleep)
    with pytest.raises(CallerGoneError):
        await while_connected(
            writer.write(b"data: 1\n\n"), writer.watch(first_wait_s=5, interval_s=10, send_timeout_s=60)
        )
    # All but the 490 s for which this process did not come to look.
    assert now_s == pytest.approx(490 + 5 + 10 * (10 - len(naps) - 1))
    assert 60 <= now_s - 490 <= 80
