"""Calls and reasoning in responses. The node echoes each conversation's last message as its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from penstock.contract.tool_formats import FORMATS
from penstock.producer.parsing.parsed_text import AnswerFormat
from penstock.producer.responses.output import OutputReader

MODEL = "acme/response-caller"
CALLS = """Wait.
<tool_call>
{"name": "f", "arguments": {"a": 1}}
</tool_call>
<tool_call>{"name": "g", "arguments": {}}</tool_call>"""
TEXT = f"<think>{'hm ' * 5}</think>\n{CALLS}"
TOOL = {"type": "function", "name": "f", "description": "does f", "parameters": {"type": "object", "properties": {}}}
OTHER = {"type": "function", "name": "g"}


@pytest.fixture(scope="module")
def calling_engine(stack: Any, shared_engine: Any) -> Any:
    engine = type(shared_engine)()
    stack.start_node(engine, model=MODEL, pool="response_caller", tool_parser="hermes", reasoning_parser="think")
    return engine


@pytest.fixture
def calling(stack: Any, calling_engine: Any, url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_reasoning_text_and_calls_are_items(calling: Any, calling_engine: Any) -> None:
    response = calling.responses.create(model=MODEL, input=TEXT, tools=[TOOL, OTHER])
    reasoning, message, *calls = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "hm " * 5, [])
    assert (message.type, message.content[0].text) == ("message", "Wait.\n")
    assert [(call.type, call.name, json.loads(call.arguments)) for call in calls] == [
        ("function_call", "f", {"a": 1}),
        ("function_call", "g", {}),
    ]
    assert {item.status for item in response.output} == {"completed"}
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    offered = json.loads(calling_engine.tokenizer.last_chat[1])
    assert [tool["function"]["name"] for tool in offered] == ["f", "g"]


def test_a_stream_has_each_item_and_ends_with_the_same_response(calling: Any) -> None:
    events = list(calling.responses.create(model=MODEL, input=TEXT, tools=[TOOL], stream=True))
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.type for item in added] == ["reasoning", "message", "function_call", "function_call"]
    arguments = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.name, event.arguments) for event in arguments] == [("f", '{"a": 1}'), ("g", "{}")]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"a": 1}{}'
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "hm " * 5
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = calling.responses.retrieve(events[0].response.id)
    assert events[-1].response == whole
    assert [event.item for event in events if event.type == "response.output_item.done"] == whole.output


@pytest.mark.parametrize("size", [1, 20, 1000])
def test_items_keep_the_order_of_the_text_however_it_is_cut(size: int) -> None:
    text = f"<think>hm</think>{CALLS}Then:{CALLS}"
    reader = OutputReader("pool.job", AnswerFormat(FORMATS["hermes"], "think"))
    for at in range(0, len(text), size):
        for _ in reader.push(text[at : at + size], None):
            pass
    for _ in reader.push("", "stop"):
        pass
    said = [item.name or "".join(item.texts) for item in reader.items]
    assert said == ["hm", "Wait.\n", "f", "g", "Then:Wait.\n", "f", "g"]


def test_calls_are_answered_in_the_next_response(calling: Any, calling_engine: Any) -> None:
    first = calling.responses.create(model=MODEL, input=TEXT, tools=[TOOL])
    calls = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "done"} for call in calls]
    by_chain = calling.responses.create(model=MODEL, input=results, previous_response_id=first.id, tools=[TOOL])
    chained = calling_engine.tokenizer.last_chat[0]
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    calling.responses.create(
        model=MODEL, input=[{"role": "user", "content": TEXT}, *references, *results], tools=[TOOL]
    )
    referenced = calling_engine.tokenizer.last_chat[0]
    sent_back = [item.model_dump() for item in first.output]
    calling.responses.create(model=MODEL, input=[{"role": "user", "content": TEXT}, *sent_back, *results], tools=[TOOL])
    assert by_chain.output_text == "done"
    assert chained == referenced == calling_engine.tokenizer.last_chat[0]
    assert [message["role"] for message in chained] == ["user", "assistant", "tool", "tool"]
    assert [call["name"] for call in chained[1]["tool_calls"]] == ["f", "g"]
    assert [call["id"] for call in chained[1]["tool_calls"]] == [call.call_id for call in calls]


@pytest.mark.parametrize(
    ("choice", "offered", "forced"),
    [
        ("auto", ["f", "g"], None),
        ("none", None, None),
        ("required", ["f", "g"], ["f", "g"]),
        ({"type": "function", "name": "g"}, ["f", "g"], ["g"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}, ["g"], None),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}, ["g"], ["g"]),
    ],
)
def test_the_choice_of_tools_reaches_the_node(
    calling: Any, calling_engine: Any, choice: Any, offered: Any, forced: Any
) -> None:
    response = calling.responses.create(model=MODEL, input="a", tools=[TOOL, OTHER], tool_choice=choice)
    shown = calling_engine.tokenizer.last_chat[1]
    assert (shown and [tool["function"]["name"] for tool in json.loads(shown)]) == offered
    outputs = calling_engine.last_params.structured_outputs
    assert (outputs and [function.name for function in outputs.calls.functions]) == forced
    assert [tool.name for tool in response.tools] == ["f", "g"]


def test_an_unknown_tool_is_refused(calling: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        calling.responses.create(model=MODEL, input="a", tools=[TOOL], tool_choice={"type": "function", "name": "x"})
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("effort", ["none", "high"])
def test_the_reasoning_effort_reaches_the_chat_template(calling: Any, calling_engine: Any, effort: Any) -> None:
    response = calling.responses.create(model=MODEL, input="hi", reasoning={"effort": effort})
    assert response.reasoning.effort == effort
    thinks = effort != "none"
    given = json.loads(calling_engine.tokenizer.last_template_kwargs)
    assert given == {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


@pytest.mark.parametrize("arguments", ["", None, {"a": 1}, '{"a": 1}'], ids=repr)
def test_earlier_arguments_may_be_empty_absent_or_an_object(calling: Any, calling_engine: Any, arguments: Any) -> None:
    given = {} if arguments is None else {"arguments": arguments}
    history = [
        {"role": "user", "content": "q"},
        {"type": "function_call", "call_id": "c1", "name": "f", **given},
        {"type": "function_call_output", "call_id": "c1", "output": "Sunny."},
    ]
    assert calling.responses.create(model=MODEL, input=history, tools=[TOOL]).status == "completed"
    (call,) = calling_engine.tokenizer.last_chat[0][1]["tool_calls"]
    assert json.loads(call["arguments"]) == ({"a": 1} if arguments else {})
