"""Streams and whole answers of `/v1/messages` have equal content, however a node splits the text into chunks."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from penstock.contract.job import SamplingParams
from penstock.contract.output import Choice, Chunk, FinishReason, Usage
from penstock.contract.tool_formats import FORMATS
from penstock.gateway.apis.anthropic.encoder import MessagesDialect
from penstock.gateway.stream.dialect import AnswerHead
from penstock.producer.anthropic.bodies import SHOWS_THINKING
from penstock.producer.parsing.parsed_text import PLAIN, AnswerFormat

JOB = "pool.job"
CALL = '<tool_call>{"name": "f", "arguments": {"a": "\\u2028é"}}</tool_call>'
TEXTS = st.lists(
    st.sampled_from(["Hi", " ", "\n", CALL, "<think>r\u2028</think>", "é", "<tool_call>", "STOP"]), max_size=8
)
FORMS = st.sampled_from(
    [PLAIN, AnswerFormat(FORMATS["hermes"], "think"), AnswerFormat(FORMATS["hermes"], one_call=True)]
)


def head_of(form: AnswerFormat, *, shows_thinking: bool) -> AnswerHead:
    params = SamplingParams(max_tokens=9, stop=("TOP", "STOP"), include_stop_str_in_output=True)
    return AnswerHead([JOB], "m", 1, params, form, options={SHOWS_THINKING: shows_thinking})


def streamed(head: AnswerHead, pieces: list[str], reason: FinishReason) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    encoder = MessagesDialect().stream(head)
    chunks = [Chunk(JOB, i, 0, i, (7,), piece, num_prompt_tokens=None if i else 5) for i, piece in enumerate(pieces)]
    last = Chunk(
        JOB, len(chunks), finish_reason=reason, text=chunks.pop().text, num_prompt_tokens=None if chunks else 5
    )
    raw = b"".join([*encoder.parts_of([*chunks, last]), encoder.end([Usage(5, 9, 2)])])
    assert raw.isascii()
    events = [json.loads(one.split("data: ")[1]) for one in raw.decode().removesuffix("\n\n").split("\n\n")]
    assert events[0]["message"]["usage"]["input_tokens"] == 5
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            kind, text = (value for name, value in sorted(event["delta"].items(), key=lambda item: item[0] != "type"))
            name = kind.removesuffix("_delta").replace("input_json", "input")
            if name == "input":
                inputs[len(blocks) - 1] = inputs.get(len(blocks) - 1, "") + text
            else:
                blocks[-1][name] += text
    for number, arguments in inputs.items():
        blocks[number]["input"] = from_json(arguments, allow_partial=True)
    return blocks, events[-2]


def whole(head: AnswerHead, text: str, reason: FinishReason) -> dict[str, Any]:
    encoder = MessagesDialect().whole(head)
    result: Any = SimpleNamespace(job_id=JOB, choices=(Choice(0, text, (), reason),), usage=Usage(5, 9, 2))
    parts = [encoder.head(), *encoder.parts_of(0, result), encoder.tail([Usage(5, 9, 2)])]
    return dict(json.loads(b"".join(parts)))


def content(blocks: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Return the content by type. White space of texts is dropped, as blocks of white space alone are not sent."""
    texts = "".join(block["text"] for block in blocks if block["type"] == "text")
    thoughts = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    return "".join(texts.split()), thoughts, [block for block in blocks if block["type"] == "tool_use"]


@given(TEXTS, st.data(), FORMS, st.booleans(), st.sampled_from(["stop", "length"]))
def test_stream_has_the_content_of_the_whole_answer(
    texts: list[str], data: st.DataObject, form: AnswerFormat, shows_thinking: bool, reason: FinishReason
) -> None:
    text, stop = "".join(texts), None
    if "TOP" in text and reason == "stop":
        # A node releases nothing after the stop string that begins first, and releases that one in one piece.
        stop = "STOP" if "STOP" in text else "TOP"
        text = text[: text.index(stop)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    pieces[-1] += stop or ""
    head = head_of(form, shows_thinking=shows_thinking)

    blocks, delta = streamed(head, pieces, reason)
    message = whole(head, "".join(pieces), reason)

    assert content(blocks) == content(message["content"])
    assert delta["delta"] == {name: message[name] for name in ("stop_reason", "stop_sequence")}
    assert message["stop_sequence"] == stop
    assert delta["usage"] == message["usage"]
    assert message["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 9,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert all(not block["text"].isspace() for block in blocks if block["type"] == "text")
    assert shows_thinking or not any(block["type"] == "thinking" for block in blocks)


def test_text_after_a_call_in_the_same_chunk_is_a_block_after_it() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    blocks, _ = streamed(
        head_of(AnswerFormat(FORMATS["hermes"]), shows_thinking=False), [f"a{call}b{call}", "c"], "stop"
    )
    assert [block.get("text", block["type"]) for block in blocks] == ["a", "tool_use", "b", "tool_use", "c"]
