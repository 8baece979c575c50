"""An answer is a function of its record and the log of its jobs, for each dialect, and can be cut at any byte."""

from __future__ import annotations

import asyncio
import mmap
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from penstock.contract.errors import StreamDivergedError
from penstock.contract.job import PackedPrompt, SamplingParams
from penstock.contract.output import Choice, Chunk, Outcome, TokenLogprobs, Usage
from penstock.contract.tasks import Embed
from penstock.contract.tool_formats import FORMATS
from penstock.contract.tools import ToolUse
from penstock.gateway.apis.anthropic.encoder import MessagesDialect
from penstock.gateway.apis.jobs.answers import JobEncoder, StreamStart
from penstock.gateway.apis.openai.encoder import ChatDialect, CompletionDialect
from penstock.gateway.apis.responses.encoder import ResponseDialect, answer_options
from penstock.gateway.apis.responses.record import StoredResponse, decode_stored_response
from penstock.gateway.apis.tasks.routes import RerankEncoder
from penstock.gateway.kept.answer import AnswerKeep, unpacked
from penstock.gateway.kept.slots import AnswerSlot, Left, memory_bytes
from penstock.gateway.request.earlier_reasoning import SEAL
from penstock.gateway.request.generation import GenerationRequest, StreamPosition
from penstock.gateway.request.jobs import Keeping, open_jobs
from penstock.gateway.request.kept import facts_of, generation_of_record
from penstock.gateway.stream.dialect import AnswerHead, Dialect, format_of_packed, packed_format
from penstock.gateway.stream.writer import SSE, EventWriter, Framing, NdjsonFraming
from penstock.producer.anthropic.bodies import SHOWS_THINKING
from penstock.producer.parsed_body import ParsedBody
from penstock.producer.parsing.parsed_text import PLAIN, AnswerFormat
from penstock.queue.results import PackedResult, encode_result

JOBS = ("pool.one", "pool.two")
CALL = '<tool_call>{"name": "f", "arguments": {"a": "\\u2028é"}}</tool_call>'
PIECES = ("Hi", " ", "\n", CALL[:20], CALL[20:], "<think>r\u2028</think>", "é", "STOP", "a long word" * 9)
FORM = AnswerFormat(FORMATS["hermes"], "think")
SEALED = {"key": b"k" * 32, "tenant": "t", "model": "m"}
RECORD = StoredResponse(1, True, FORM, b'{"tools":[]}', [], sealed_for="m")
DONE = Outcome("succeeded")
Encode = Callable[[Sequence[Chunk]], Iterator[bytes]]


def log_of(job_id: str, choices: int, *, logprobs: bool = False) -> list[Chunk]:
    """Return the log of a job whose choices take turns."""
    chunks: list[Chunk] = []
    texts = [random.choices(PIECES, k=8) for _ in range(choices)]
    for at in range(8):
        for choice in range(choices):
            rows = (TokenLogprobs((7, 8), (-1.0, -2.0), (b"x", b"y")),) if logprobs else ()
            last, first = at == 7, not chunks
            chunks.append(
                Chunk(
                    job_id,
                    len(chunks),
                    choice,
                    at,
                    (7,),
                    texts[choice][at],
                    "stop" if last else None,
                    Usage(5, 8 * choices) if last and choice == choices - 1 else None,
                    logprobs=rows,
                    num_prompt_tokens=5 if first else None,
                )
            )
    return [*chunks, Chunk(job_id, len(chunks), outcome=DONE)]


def head(form: AnswerFormat = PLAIN, *, jobs: int = 1, ids: bool = False, **options: Any) -> AnswerHead:
    params = SamplingParams(max_tokens=9, stop=("STOP",), n=options.pop("n", 1), logprobs=options.pop("logprobs", None))
    return AnswerHead(JOBS[:jobs], "m", 1, params, form, options=options, event_ids=ids, max_total_tokens=99)


class _Responses(Dialect):
    """Responses, whose end is no part of `end`."""

    def stream(self, answer: AnswerHead) -> Any:
        encoder = ResponseDialect().stream(answer)

        def end(_: Sequence[Usage]) -> bytes:
            return b"".join(encoder.closing(DONE, 3))

        return SimpleNamespace(parts_of=encoder.parts_of, end=end)

    def whole(self, answer: AnswerHead) -> Any:
        return ResponseDialect().whole(answer)


class _Jobs(Dialect):
    def stream(self, answer: AnswerHead) -> Any:
        return JobEncoder(StreamStart())

    def whole(self, answer: AnswerHead) -> Any:
        raise NotImplementedError


RESPONSE = answer_options(RECORD, cast(Any, SEALED), finished_s=3)
STREAMS: dict[str, tuple[Dialect, AnswerHead]] = {
    "chat": (ChatDialect(), head(include_usage=True)),
    "chat with ids": (ChatDialect(), head(ids=True, continuous_usage_stats=True, n=2)),
    "chat with calls": (ChatDialect(), head(FORM, ids=True)),
    "chat with log-probabilities": (ChatDialect(), head(logprobs=1, n=2)),
    "completion": (CompletionDialect(), head()),
    "completions": (CompletionDialect(), head(jobs=2, n=2, include_usage=True)),
    "message": (MessagesDialect(), head()),
    "message with thinking": (MessagesDialect(), head(FORM, **{SHOWS_THINKING: True, SEAL: SEALED})),
    "response": (_Responses(), head(FORM, **RESPONSE)),
    "job": (_Jobs(), head()),
}


def resumed_at(counters: Sequence[int], total: int, flags: int = 0) -> AnswerKeep:
    slot = AnswerSlot(mmap.mmap(-1, memory_bytes(1)), 0)
    slot.begin(b"", len(counters) // 2, num_before=0, num_read=0)
    cycle: Any = SimpleNamespace(send=None, transport=SimpleNamespace(write=None, get_write_buffer_size=None))
    keep = AnswerKeep(cycle, cycle)
    left = Left(1, 2, False, 0, b"", 0, 0, total=total, flags=flags, counters=tuple(counters))
    keep.take_over(slot, left, {}, lambda: None)
    return keep


async def sent(
    dialect: Dialect,
    answer: AnswerHead,
    logs: Sequence[Sequence[Chunk]],
    framing: Framing,
    *,
    grouped: bool,
    keep: AnswerKeep | None = None,
) -> list[tuple[int, bytes, bytes]]:
    """Send a stream. Return for each part the number of its job, its events, and the bytes for the client."""
    found: list[tuple[int, bytes, bytes]] = []
    new = bytearray()

    async def send(message: Any) -> None:
        new.extend(message.get("body", b""))

    writer = EventWriter(send, framing, keep=keep)
    encoder, numbers = dialect.stream(answer), {job_id: number for number, job_id in enumerate(answer.job_ids)}

    async def write(events: bytes, counter: int) -> None:
        await writer.write(events, counter)
        found.append((counter, events, bytes(new)))
        new.clear()

    left = [list(log) for log in logs]
    while any(left):
        log = random.choice([log for log in left if log])
        size = random.randint(1, len(log)) if grouped else 1
        batch, log[:] = log[:size], log[size:]
        for events in encoder.parts_of(batch):
            await write(events, numbers[batch[0].job_id])
    await write(encoder.end([Usage(5, 8)] * len(logs)), 0 if len(logs) == 1 else len(logs))
    await writer.end()
    return [*found, (-1, b"", bytes(new))]


def events_of(parts: Sequence[tuple[int, bytes, bytes]], number: int) -> bytes:
    return b"".join(events for counter, events, _ in parts if counter == number)


@pytest.mark.parametrize("framing", [lambda: SSE, NdjsonFraming], ids=["events", "lines"])
@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_has_the_same_bytes_however_chunks_are_grouped_and_wherever_it_is_cut(name, framing):
    dialect, answer = STREAMS[name]
    random.seed(name)
    with_rows = answer.params.logprobs is not None
    for _ in range(5):
        logs = [log_of(job_id, answer.params.n, logprobs=with_rows) for job_id in answer.job_ids]
        whole = await sent(dialect, answer, logs, framing(), grouped=False)
        num_counters = 1 if len(logs) == 1 else len(logs) + 1
        again = await sent(dialect, answer, logs, framing(), grouped=True)
        for number in range(num_counters):
            assert events_of(whole, number) == events_of(again, number)
        for cut in sorted(random.sample(range(1, len(whole)), min(6, len(whole) - 1))):
            counters = [count for number in range(num_counters) for count in counted(whole[:cut], number)]
            keep = resumed_at(counters, 1)
            rest = await sent(dialect, answer, logs, framing(), grouped=True, keep=keep)
            assert not keep.is_behind
            for number in range(num_counters):
                got = b"".join(body for counter, _, body in whole[:cut] if counter == number)
                got += b"".join(body for counter, _, body in rest if counter == number)
                assert got == b"".join(body for counter, _, body in whole if counter == number)
            assert rest[-1][2] == whole[-1][2]


def counted(parts: Sequence[tuple[int, bytes, bytes]], number: int) -> tuple[int, int]:
    events = events_of(parts, number)
    return len(events), zlib.adler32(events)


async def test_a_log_that_has_changed_is_noticed():
    dialect, answer = STREAMS["chat"]
    log = log_of(JOBS[0], 1)
    parts = await sent(dialect, answer, [log], SSE, grouped=False)
    keep = resumed_at(counted(parts[:5], 0), 1)
    other = [log[0], *(Chunk(c.job_id, c.index, c.choice, c.position, c.token_ids, "other") for c in log[1:])]
    with pytest.raises(StreamDivergedError):
        await sent(dialect, answer, [other], SSE, grouped=False, keep=keep)


WHOLE: dict[str, tuple[Dialect, AnswerHead]] = {
    name: STREAMS[name]
    for name in ("chat", "chat with calls", "completions", "message", "message with thinking", "response")
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_answer_has_the_same_bytes_each_time(name):
    dialect, answer = WHOLE[name]
    texts = "".join(PIECES)
    choices = tuple(Choice(number, texts, (7, 8), "stop") for number in range(answer.params.n))
    packed = encode_result(choices, Usage(5, 8), [])

    def encoded() -> bytes:
        encoder = dialect.whole(answer)
        parts = [encoder.head()]
        for index, job_id in enumerate(answer.job_ids):
            parts += encoder.parts_of(index, PackedResult(packed, job_id, DONE))
        return b"".join([*parts, encoder.tail([Usage(5, 8)] * len(answer.job_ids))])

    assert encoded() == encoded()


def test_a_record_gives_back_the_request_and_what_its_encoder_needs():
    use = ToolUse('[{"type":"function","function":{"name":"f"}}]', "auto", False)
    params = SamplingParams(max_tokens=9, stop=("STOP",), logit_bias={7: 1.0})
    names = {"prompt": "messages"}
    body = ParsedBody("m", ["a", "b"], params, names, use, options={"include_usage": True}, stream=True)
    cut_at = StreamPosition("pool.one", 3, 7, lacks_end=True)
    generation = GenerationRequest(body, {"tenant": "t", "lower_max_tokens": True}, cut_at, True, True)
    record = facts_of(generation, JOBS, shows_prompts=False)
    made = generation_of_record(unpacked(_packed({**record, "head": 1}) + _packed({"head": 2})))
    assert (made.cut_at, made.event_ids, made.replay_from_start) == (cut_at, True, True)
    assert (made.tenant, made.lowers_max_tokens, made.read_after) == ("t", True, generation.read_after)
    assert (made.body.params, made.body.options, made.body.names) == (params, body.options, names)
    assert len(made.body.prompts) == 2 and "".join(map(str, made.body.prompts)) == ""
    assert format_of_packed(packed_format(FORM)) == FORM and format_of_packed(packed_format(PLAIN)) is PLAIN
    assert decode_stored_response(RECORD.encode()) == RECORD


@pytest.mark.parametrize("of_body", [True, False])
async def test_what_tokens_wait_for_outlives_the_gateway(of_body):
    body = ParsedBody("m", ["a"], queueing={"token_durability": "replicated"} if of_body else {})
    generation = GenerationRequest(body, {"tenant": "t", "token_durability": None if of_body else "replicated"})
    record = unpacked(_packed(facts_of(generation, JOBS[:1], shows_prompts=False)))
    seen = []

    async def attach(job_id, **options):
        seen.append((job_id, options["token_durability"]))
        return SimpleNamespace(id=job_id)

    keeping = Keeping(cast(Any, SimpleNamespace(record=record)))
    client = cast(Any, SimpleNamespace(attach=attach))
    async with open_jobs(client, generation_of_record(record), keeping=keeping):
        assert seen == [(JOBS[0], "replicated")]


def test_the_record_of_an_answer_with_documents_has_them():
    body = ParsedBody("m", ["query", "one", "two"], task=Embed(), options={"top_n": 2, "has_documents": True})
    record = facts_of(GenerationRequest(body), JOBS[:1], shows_prompts=True)
    prompts = generation_of_record(unpacked(_packed(record))).body.prompts
    assert all(isinstance(prompt, PackedPrompt) for prompt in prompts)
    assert RerankEncoder(AnswerHead(JOBS[:1], "m", 1, SamplingParams(), PLAIN, prompts=prompts)).head()


def _packed(facts: dict[str, Any]) -> bytes:
    return cast(bytes, msgpack.packb(facts))


def test_events_behind_a_position_are_counted_once():
    keep = resumed_at([4, 0x01F800CB], 1)  # The checksum of b"1234".
    assert asyncio.run(_split(keep)) == [(b"12", b""), (b"34", b"5"), (b"", b"6")]


async def _split(keep: AnswerKeep) -> list[tuple[bytes, bytes]]:
    return [keep.split(0, events) for events in (b"12", b"345", b"6")]
