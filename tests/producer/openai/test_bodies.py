"""A body with a hundred thousand errors is refused for the first one, without listing the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.contract.problems import MAX_PROBLEMS
from penstock.producer.openai.bodies import ChatBody, CompletionBody
from penstock.producer.openai.messages import OfferedTool

MANY = 5_000
NAMES = {f"a{number}": 1 for number in range(MANY)}
WRONG = [0] * MANY
CALLS = {
    "form": {"name": "hermes", "kind": "json", "call": "<tool_call>", "call_end": "</tool_call>", "padding": "\n"},
    "functions": [{"name": "f", "parameters": "{}"}],
}


@pytest.mark.parametrize(
    "change",
    [
        NAMES,
        {"logit_bias": {str(number): "" for number in range(MANY)}},
        {"logit_bias": NAMES},
        {"stop": WRONG},
        {"stop_token_ids": [""] * MANY},
        {"bad_words": WRONG},
        {"response_format": {"type": "text", **NAMES}},
        {"structured_outputs": NAMES},
        {"structured_outputs": {"choice": WRONG}},
        {"structured_outputs": {"choice": [""] * MANY}},
        {"structured_outputs": {"calls": CALLS | NAMES}},
        {"structured_outputs": {"calls": CALLS | {"functions": WRONG}}},
        {"structured_outputs": {"calls": CALLS | {"functions": [NAMES]}}},
        {"messages": WRONG},
        {"messages": [NAMES]},
        {"messages": [{"role": "assistant", "tool_calls": WRONG}]},
        {"tools": WRONG},
        {"tools": [{"type": "function", "function": NAMES}]},
        {"prompt": [[]] * MANY},
        {"prompt": [-1] * MANY},
    ],
)
def test_many_invalid_members_make_few_errors(change: dict[str, Any]) -> None:
    body = CompletionBody if "prompt" in change else ChatBody
    neutral = {} if "prompt" in change else {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(ValidationError) as caught:
        body.model_validate_json(json.dumps({**neutral, **change})).params()
    assert caught.value.error_count() <= MAX_PROBLEMS


def test_a_tool_is_offered_as_it_was_sent() -> None:
    parameters = {"type": "object", "properties": {"a": {"default": None}, "b": {"enum": [None, 1.5, "é"]}}}
    for function in ({"name": "f"}, {"name": "f", "parameters": parameters, "strict": True}):
        tool = {"type": "function", "function": function}
        assert OfferedTool.model_validate(tool | {"function": {"description": None, **function}}).offer() == tool


def test_five_hundred_tools_in_a_mebibyte_are_accepted() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "x" * 1900}}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(500)]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    offered = ChatBody.model_validate_json(json.dumps(body)).tool_use().tools or ""
    assert len(json.loads(offered)) == 500 and len(offered) > 1_000_000
