"""Which answers are kept, what a record leaves out, and the end of an answer that kills its gateways."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.contract.errors import NotFoundError, UnavailableError
from penstock.contract.tenant import ApiKey
from penstock.gateway.errors import ErrorShapes
from penstock.gateway.http.middleware.drain import Drain
from penstock.gateway.kept.answer import MAX_TAKEOVERS, AnswerKeep, keep_of, offer_keep, record_of, scope_of, unpacked
from penstock.gateway.kept.connection import KeptConnection
from penstock.gateway.kept.slots import FINAL, MAX_COUNTERS, MAX_RECORD_BYTES, WITHIN, AnswerSlot, Left, memory_bytes
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.request.generation import GenerationRequest
from penstock.gateway.request.jobs import Keeping, open_jobs
from penstock.producer.parsed_body import ParsedBody


class FakeKeep:
    """A keeper with one slot."""

    is_alive = True

    def __init__(self) -> None:
        self.slot, self.unkept = AnswerSlot(mmap.mmap(-1, memory_bytes(1)), 0), list[str]()

    def note_unkept(self, reason: str) -> None:
        self.unkept.append(reason)


class FakeConnection(KeptConnection):
    """A connection whose kernel counts nothing."""

    def __init__(self, keep: Any) -> None:
        super().__init__(keep, SimpleNamespace(write=None, get_write_buffer_size=None, abort=self._abort))
        self._given = keep
        self.was_aborted = False

    def _abort(self) -> None:
        self.was_aborted = True

    def begin(self, record: bytes, num_counters: int) -> AnswerSlot | None:
        if len(record) > MAX_RECORD_BYTES:
            return super().begin(record, num_counters)
        self._given.slot.begin(record, num_counters, num_before=0, num_read=0)
        return self._given.slot


def cycle_of(**fields: Any) -> Any:
    """Return what stands for the server's side of a request."""
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"authorization", b"Bearer pk-secret"), (b"accept", b"text/event-stream"), (b"cookie", b"secret")],
        "state": {"request_id": "request-1", "caller": ApiKey(key_id="one", digest="", tenant="t")},
        **fields,
    }
    made = SimpleNamespace(scope=scope, transport=SimpleNamespace(write=None, get_write_buffer_size=None))
    made.sent, made.response_started, made.keep_alive, made.chunked_encoding = [], False, True, None

    async def send(message: Any) -> None:
        made.sent.append(message)

    made.send = send
    return made


def kept(cycle: Any) -> tuple[AnswerKeep, FakeKeep]:
    keeper = FakeKeep()
    return offer_keep(cycle, FakeConnection(keeper)), keeper


def test_a_record_has_what_a_successor_needs_and_no_secret():
    keep, keeper = kept(cycle := cycle_of())
    assert keep_of(cycle.scope) is keep and record_of(cycle.scope) is None
    keep.begin({"job_ids": ["pool.one"]})
    data = keeper.slot.left().record
    assert keep.is_kept and b"secret" not in data
    scope = scope_of(unpacked(data), None, None)
    assert scope["headers"] == [(b"accept", b"text/event-stream"), (b"x-request-id", b"request-1")]
    assert (scope["path"], unpacked(data)["scope"]["key_id"]) == ("/v1/chat/completions", "one")


@pytest.mark.parametrize("fields", [{"http_version": "1.0"}, {"method": "HEAD"}])
def test_answers_of_other_forms_are_not_kept(fields):
    keep, _ = kept(cycle_of(**fields))
    keep.begin({})
    assert not keep.is_kept


def test_answers_with_many_jobs_or_a_large_record_are_not_kept():
    keep, keeper = kept(cycle_of())
    keep.begin({}, MAX_COUNTERS + 1)
    assert not keep.is_kept
    keep.begin({"documents": bytes(MAX_RECORD_BYTES)})
    assert not keep.is_kept and keeper.unkept == ["large_record"]


async def test_the_last_bytes_of_an_answer_are_marked():
    cycle = cycle_of()
    keep, keeper = kept(cycle)
    keep.begin({})
    await cycle.send({"type": "http.response.start", "status": 201, "headers": []})
    await cycle.send({"type": "http.response.body", "body": b"a", "more_body": True})
    assert (keeper.slot.status, keeper.slot.flags) == (201, 0)
    await cycle.send({"type": "http.response.body", "body": b""})
    assert keeper.slot.flags & FINAL and len(cycle.sent) == 3


def taken_over(flags: int = 0, *, total: int = 1, takeovers: int = 0, status: int = 200) -> tuple[Any, AnswerKeep]:
    cycle = cycle_of()
    keep, keeper = kept(cycle)
    keeper.slot.begin(b"", 1, num_before=0, num_read=0)
    keeper.slot.status = status
    left = Left(1, 2, False, takeovers, b"", 0, 0, total=total, flags=flags, counters=(0, 0))
    keep.take_over(keeper.slot, left, {"is_stream": True}, lambda: None)
    return cycle, keep


async def test_a_head_that_the_client_has_is_not_sent_again():
    cycle, keep = taken_over()
    assert keep.has_head and record_of(cycle.scope) is not None
    await cycle.send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
    assert cycle.sent == [] and cycle.response_started
    assert (cycle.expected_content_length, cycle.chunked_encoding) == (7, False)


async def test_an_answer_with_another_status_than_the_client_has_is_cut_off():
    cycle, keep = taken_over(status=200)
    await cycle.send({"type": "http.response.start", "status": 500, "headers": []})
    assert cycle.sent == [] and keep._connection.transport.abort.__self__.was_aborted  # type: ignore[attr-defined]


async def drained(cycle: Any) -> list[Any]:
    """Answer a request that was taken over, whose app must not run."""

    async def app(*_: Any) -> None:
        raise AssertionError

    drain = Drain(app, errors=ErrorShapes([]), metrics=GatewayMetrics())
    await drain(cycle.scope, app, cycle.send)
    return list(cycle.sent)


async def test_an_answer_that_killed_two_gateways_ends_with_an_error():
    cycle, keep = taken_over(total=0, takeovers=MAX_TAKEOVERS)
    start, _ = await drained(cycle)
    assert start["status"] == 503 and keep.is_poisoned
    cycle, keep = taken_over(takeovers=MAX_TAKEOVERS)
    (body,) = await drained(cycle)
    assert b"gateway_stopped" in body["body"] and not body["more_body"]
    cycle, keep = taken_over(WITHIN, takeovers=MAX_TAKEOVERS)
    assert await drained(cycle) == [] and keep.was_within_event


async def test_an_answer_whose_job_was_not_submitted_is_refused_so_that_its_client_repeats_it():
    _, keep = taken_over(total=0)
    keep.record = {"job_ids": ["pool.one"]}

    async def attach(job_id: str, **_: Any) -> None:
        raise NotFoundError(f"no job {job_id}", code="job_not_found")

    client: Any = SimpleNamespace(attach=attach)
    generation = GenerationRequest(ParsedBody("m", ["a"]))
    with pytest.raises(UnavailableError) as refused:
        async with open_jobs(client, generation, keeping=Keeping(keep)):
            raise AssertionError
    assert (refused.value.code, refused.value.status) == ("gateway_stopped", 503)
