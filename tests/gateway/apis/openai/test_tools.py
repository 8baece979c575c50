"""Tool calls and reasoning through the official client. The node echoes each chat's last message as its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import httpx
import openai
import pytest
import redis
from pydantic import BaseModel

from penstock.contract.job import SamplingParams
from penstock.contract.output import Chunk
from penstock.contract.tool_formats import FORMATS
from penstock.gateway.apis.openai.encoder import ChatDialect
from penstock.gateway.stream.dialect import AnswerHead
from penstock.producer.parsing.parsed_text import AnswerFormat
from penstock.queue import keys

CALLS = """Wait.
<tool_call>
{"name": "f", "arguments": {"a": 1}}
</tool_call>
<tool_call>{"name": "g", "arguments": {}}</tool_call>"""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "does f",
            "parameters": {"type": "object", "properties": {"b": {}, "a": {}}},
        },
    }
]
MODEL = "acme/caller"


@pytest.fixture(scope="module")
def calling_engine(stack, shared_engine):
    engine = type(shared_engine)()
    stack.start_node(engine, model=MODEL, pool="caller", tool_parser="hermes", reasoning_parser="think")
    return engine


@pytest.fixture(scope="module")
def calling_url(stack, calling_engine) -> str:
    return stack.start_gateway()


@pytest.fixture
def calling(calling_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{calling_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_calls_come_as_calls_and_the_text_before_them_as_content(calling, calling_engine):
    answer = calling.chat.completions.create(model=MODEL, messages=user(CALLS), tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Wait.\n")
    said = [(call.type, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert said == [("function", "f", {"a": 1}), ("function", "g", {})]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert json.loads(calling_engine.tokenizer.last_chat[1]) == TOOLS


def test_stream_has_each_call_once_in_the_same_shape(calling):
    text = f"<think>{'hm ' * 5}</think>\n{CALLS}"
    stream = calling.chat.completions.create(model=MODEL, messages=user(text), tools=TOOLS, stream=True, n=2)
    pieces = [chunk.choices[0] for chunk in stream]
    for number in (0, 1):
        mine = [piece for piece in pieces if piece.index == number]
        deltas = [piece.delta for piece in mine]
        assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm " * 5
        assert "".join(delta.content or "" for delta in deltas) == "Wait.\n"
        parts = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [(call.index, call.function.name) for call in parts if call.function.name] == [(0, "f"), (1, "g")]
        arguments = ["".join(call.function.arguments for call in parts if call.index == index) for index in (0, 1)]
        assert arguments == ['{"a": 1}', "{}"]
        assert [piece.finish_reason for piece in mine] == [None] * (len(mine) - 1) + ["tool_calls"]
    ids = [call.id for piece in pieces for call in piece.delta.tool_calls or () if call.id]
    assert len(ids) == len(set(ids)) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_tool_calls_only_the_first_call_is_returned(calling, stream):
    options = {"tools": TOOLS, "parallel_tool_calls": False, "stream": stream}
    answer = calling.chat.completions.create(model=MODEL, messages=user(CALLS), **options)
    said = [piece.choices[0].delta for piece in answer] if stream else [answer.choices[0].message]
    calls = [call for one in said for call in one.tool_calls or ()]
    # The arguments may come in several deltas, of which only the first has the name.
    assert [call.function.name for call in calls if call.function.name] == ["f"]
    assert {call.index for call in calls} == {0} if stream else len(calls) == 1


FUNCTION: dict[str, Any] = TOOLS[0]["function"]
STRICT = [{"type": "function", "function": FUNCTION | {"strict": True}}]
JSON = {"type": "json_schema", "json_schema": {"name": "number", "schema": {"type": "integer"}}}
CLOSED = FUNCTION["parameters"] | {"additionalProperties": False}
OTHER = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"tools": TOOLS}, None),
        ({"tools": TOOLS, "tool_choice": "none"}, None),
        ({"tools": STRICT, "tool_choice": "none"}, None),
        ({"tools": TOOLS, "tool_choice": "required"}, {"required": True, "parallel": True}),
        ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, {"required": True}),
        (
            {"tools": [*TOOLS, OTHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            {"required": True},
        ),
        ({"tools": STRICT}, {"required": False, "parallel": True}),
        ({"tools": STRICT, "response_format": JSON}, {"answer": '{"type": "integer"}', "parallel": True}),
        ({"tools": STRICT, "response_format": JSON, "tool_choice": "required"}, {"required": True, "parallel": True}),
    ],
)
def test_tool_choice_becomes_a_constraint_of_the_job(calling, calling_engine, options, wanted):
    calling.chat.completions.create(model=MODEL, messages=user("a"), **options)
    form = calling_engine.last_params.structured_outputs
    if wanted is None:
        assert form is None
        return
    (function,) = form.calls.functions
    assert (function.name, json.loads(function.parameters)) == ("f", CLOSED)
    said = form.calls.model_dump(exclude={"functions"})
    assert (
        said
        == {
            "form": asdict(FORMATS["hermes"]),
            "reasoning": "think",
            "required": False,
            "parallel": False,
            "answer": None,
        }
        | wanted
    )


class Add(BaseModel):
    """Adds."""

    a: int
    b: int


def test_the_clients_own_helpers_parse_the_calls_of_strict_tools(calling):
    tools = [openai.pydantic_function_tool(Add)]
    said = 'Well. <tool_call>{"name": "Add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    answer = calling.chat.completions.parse(model=MODEL, messages=user(said), tools=tools)
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == Add(a=1, b=2)
    with calling.chat.completions.stream(model=MODEL, messages=user(said), tools=tools) as stream:
        assert "tool_calls.function.arguments.done" in [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Well. "
    assert message.tool_calls[0].function.parsed_arguments == Add(a=1, b=2)


def test_beside_a_strict_function_the_arguments_of_others_are_any_object(calling, calling_engine):
    calling.chat.completions.create(model=MODEL, messages=user("a"), tools=[*STRICT, OTHER])
    functions = calling_engine.last_params.structured_outputs.calls.functions
    assert [json.loads(one.parameters) for one in functions] == [CLOSED, {"type": "object"}]


def test_a_forced_function_that_is_not_strict_keeps_the_meaning_of_its_schema(calling, calling_engine):
    loose = [{"type": "function", "function": FUNCTION | {"strict": False}}]
    calling.chat.completions.create(model=MODEL, messages=user("a"), tools=loose, tool_choice="required")
    (function,) = calling_engine.last_params.structured_outputs.calls.functions
    assert json.loads(function.parameters) == FUNCTION["parameters"]


@pytest.mark.parametrize("stream", [False, True])
def test_call_of_a_named_function_ends_with_finish_reason_stop(calling, stream):
    named = {"type": "function", "function": {"name": "f"}}
    answer = calling.chat.completions.create(
        model=MODEL, messages=user(CALLS), tools=TOOLS, tool_choice=named, stream=stream
    )
    assert [piece.choices[0] for piece in (answer if stream else [answer])][-1].finish_reason == "stop"


def test_calls_and_their_results_can_be_sent_back(calling, calling_engine):
    chat = user(CALLS)
    message = calling.chat.completions.create(model=MODEL, messages=chat, tools=TOOLS).choices[0].message
    gave = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in message.tool_calls]
    answer = calling.chat.completions.create(model=MODEL, messages=[*chat, message, *gave], tools=TOOLS)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("done", "stop")
    turns = calling_engine.tokenizer.last_chat[0]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool"]
    assert [call["name"] for call in turns[1]["tool_calls"]] == ["f", "g"]
    assert [turn["tool_call_id"] for turn in turns[2:]] == [call.id for call in message.tool_calls]


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_a_call_is_text_and_none_are_offered(calling, calling_engine, options):
    answer = calling.chat.completions.create(model=MODEL, messages=user(CALLS), **options)
    assert (answer.choices[0].message.content, answer.choices[0].message.tool_calls) == (CALLS, None)
    assert calling_engine.tokenizer.last_chat[1] is None


def test_stream_resumes_in_the_middle_of_a_call(calling_url):
    body = {"model": MODEL, "messages": user(f"<think>hm</think>{CALLS}"), "tools": TOOLS, "stream": True}
    body["stream_options"] = {"include_event_ids": True}
    with httpx.Client(base_url=calling_url, timeout=60) as http:
        whole = http.post("/v1/chat/completions", json=body).text.split("\n\n")[:-1]
        for at in range(len(whole) - 1):
            place = whole[at].split("\n")[0].removeprefix("id: ")
            rest = http.post("/v1/chat/completions", json=body, params={"after": place}).text.split("\n\n")[:-1]
            assert [_said(event) for event in rest] == [_said(event) for event in whole[at + 1 :]]


def _said(event: str) -> Any:
    data = event.split("data: ")[1]
    return data if data == "[DONE]" else json.loads(data)["choices"]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["acme/echo", "echo-alias"])
def test_tools_that_a_model_cannot_call_are_refused_before_anything_is_queued(api, redis_url, model, stream, choice):
    with redis.Redis.from_url(redis_url) as queue:
        asked = {"model": model, "messages": user("hi"), "stream": stream}
        assert api.chat.completions.create(**asked)
        before = int(queue.hget(keys.counts("echo"), "submitted"))
        with pytest.raises(
            openai.BadRequestError, match=r"takes no tools.*--tool-parser none.*response_format"
        ) as caught:
            api.chat.completions.create(**asked, tools=TOOLS, tool_choice=choice)
        assert caught.value.param == "tools"
        assert int(queue.hget(keys.counts("echo"), "submitted")) == before > 0


def test_completions_are_never_parsed_for_calls(calling):
    text = f"<think>hm</think>{CALLS}"
    assert calling.completions.create(model=MODEL, prompt=text, max_tokens=250).choices[0].text == text


def test_part_of_a_call_and_the_finish_reason_of_one_chunk_come_in_two_events():
    params = SamplingParams(max_tokens=9)
    head = AnswerHead(["pool.job"], "m", 1, params, AnswerFormat(FORMATS["hermes"]), event_ids=True)
    encoder = ChatDialect().stream(head)
    call = '<tool_call>{"name": "f", "arguments": {"a": 1'
    raw = b"".join(encoder.parts_of([Chunk("pool.job", 0, 0, 0, (7,), call, finish_reason="length")])).decode()
    first, last = raw.split("\n\n")[:-1]
    assert _said(first)[0]["delta"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1'}
    assert (_said(last)[0]["delta"], _said(last)[0]["finish_reason"]) == ({}, "length")
    assert first.split("\n")[0] == last.split("\n")[0] + ".1"
