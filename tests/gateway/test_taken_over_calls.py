"""A stream of calls that another gateway takes over at any token has the same events, in every format of calls."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from penstock.contract.calls.writing import written_calls
from penstock.contract.job import SamplingParams
from penstock.contract.output import Chunk, Usage
from penstock.contract.tool_formats import BY_NAME, FALLBACK, FORMATS, ToolFormat
from penstock.gateway.apis.anthropic.encoder import MessagesDialect
from penstock.gateway.apis.openai.encoder import ChatDialect
from penstock.gateway.request.generation import StreamPosition
from penstock.gateway.stream.dialect import AnswerHead
from penstock.producer.parsing.parsed_text import AnswerFormat

JOB, NAMES = "pool.job", [*FORMATS, FALLBACK.name]
PROPERTIES = {"text": {"type": "string"}, "count": {"type": "integer"}, "parts": {"type": "array"}}
TOOLS = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {"properties": PROPERTIES}}}])
CALLS = [("f", {"text": 'a "b"\n<c> \\', "count": 3, "parts": [1, "x"]}), ("f", {})]
_TOKEN_CHARS = 3


def answer_in(form: ToolFormat) -> str:
    """Return an answer with reasoning, a text and calls, as far as the format has them."""
    calls = CALLS[: 1 if form.is_single else 2]
    if form.header:
        before, after = form.recipient
        header = f"{before}f{after}" if before else ""
        turn, end = form.turn or form.header, form.message_ends[0] if form.message_ends else ""
        said = f"{form.text_opening.removeprefix(form.begun)}Well.{end}"
        return f"{said}{turn.removeprefix(form.begun)}{header}{written_calls(form, calls)}"
    text = "" if form.is_bare else f"{form.text_opening}Well, <b>.\n{form.text_end}"
    return f"{form.reasoning[0]}Hm.{form.reasoning[1]}{text}{written_calls(form, calls)}"


def chunks_of(text: str) -> list[Chunk]:
    """Return the chunks of a stream with one token each, and its end."""
    pieces = [text[at : at + _TOKEN_CHARS] for at in range(0, len(text), _TOKEN_CHARS)]
    chunks = [Chunk(JOB, i, 0, i, (7,), one, num_prompt_tokens=None if i else 5) for i, one in enumerate(pieces)]
    return [*chunks, Chunk(JOB, len(chunks), 0, len(chunks), (2,), "", "stop", usage=Usage(5, len(chunks) + 1, 0))]


def head_of(form: ToolFormat, cut_at: StreamPosition | None = None) -> AnswerHead:
    frame = form if form.has_frame else None
    answer = AnswerFormat(form, "think", functions=TOOLS, frame=frame, marks=form.reasoning)
    params = SamplingParams(max_tokens=500)
    return AnswerHead([JOB], "m", 1, params, answer, cut_at=cut_at, replays=cut_at is not None, event_ids=True)


def events_of(chunks: Sequence[Chunk], cut_at: StreamPosition | None, form: ToolFormat) -> list[bytes]:
    encoder = ChatDialect().stream(head_of(form, cut_at))
    return [b"".join(encoder.parts_of([one])) for one in chunks]


@pytest.mark.parametrize("step", [40, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_a_chat_goes_on_with_the_same_events_behind_each_token(name: str, step: int) -> None:
    form = BY_NAME[name]
    chunks = chunks_of(answer_in(form))
    events = events_of(chunks, None, form)
    assert b'"name":"f"' in b"".join(events)
    for at in range(0, len(chunks) - 1, step):
        encoder = ChatDialect().stream(head_of(form, StreamPosition(JOB, at, at + 1)))
        # What a reader has not seen yet comes in one batch, as from a log.
        assert b"".join(encoder.parts_of(chunks)) == b"".join(events[at + 1 :]), at


@pytest.mark.parametrize("name", NAMES)
def test_a_message_has_the_same_bytes_however_its_chunks_are_read(name: str) -> None:
    """The next gateway writes an answer again, and leaves out as many bytes as were sent."""
    form = BY_NAME[name]
    chunks = chunks_of(answer_in(form))
    encoder = MessagesDialect().stream(head_of(form))
    whole = b"".join(b"".join(encoder.parts_of([one])) for one in chunks)
    assert b'"name":"f"' in whole
    encoder, at = MessagesDialect().stream(head_of(form)), len(chunks) // 3
    assert b"".join([*encoder.parts_of(chunks[:at]), *encoder.parts_of(chunks[at:])]) == whole
