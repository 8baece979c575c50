"""The effect of `tool_choice` on the submitted job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.contract.errors import RequestError
from penstock.contract.job import JobDef
from penstock.contract.pool import PoolRecord
from penstock.contract.tool_formats import FORMATS
from penstock.producer.client.request import build_job

HERMES = PoolRecord("m", "m", tool_format=FORMATS["hermes"], reasoning_parser="think_open")
LLAMA = PoolRecord("m", "m", tool_format=FORMATS["llama3_json"])
MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "integer"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
STRICT = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]


def made(record: PoolRecord = HERMES, **options: Any) -> JobDef:
    return build_job(MESSAGES, options, record, "default")  # type: ignore[arg-type]


def test_a_required_call_may_be_of_every_tool_and_a_named_one_of_its_own() -> None:
    job = made(tools=TOOLS, tool_choice="required", max_tokens=5, temperature=0.5)
    assert job.params.structured_outputs is not None and job.params.structured_outputs.calls is not None
    assert (job.params.max_tokens, job.params.temperature) == (5, 0.5)
    assert [one.name for one in job.params.structured_outputs.calls.functions] == ["f", "g"]
    named = made(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "g"}})
    assert named.params.structured_outputs is not None and named.params.structured_outputs.calls is not None
    assert [one.name for one in named.params.structured_outputs.calls.functions] == ["g"]
    # The model is shown all of them all the same.
    assert named.tools == job.tools


def test_answer_without_calls_may_have_a_schema() -> None:
    for wanted, answer in (({"json": SCHEMA}, json.dumps(SCHEMA)), ({"json_object": True}, '{"type": "object"}')):
        form = made(tools=TOOLS, structured_outputs=wanted).params.structured_outputs
        assert form is not None and form.calls is not None
        assert (form.json_schema, form.json_object) == (None, False)
        assert (form.calls.answer, form.calls.required) == (answer, False)
        assert [one.parameters for one in form.calls.functions] == ['{"type": "object"}'] * 2


def test_a_job_that_is_submitted_once_more_is_the_same() -> None:
    formed = {"tools": TOOLS, "structured_outputs": {"json": SCHEMA}}
    for options in ({"tools": STRICT}, {"tools": TOOLS, "tool_choice": "required"}, formed):
        job = made(**options)
        again = made(tools=job.tools, params=job.params)
        assert (again.params, again.tools) == (job.params, job.tools)


def test_no_tools_are_shown_that_may_not_be_called() -> None:
    job = made(tools=STRICT, tool_choice="none")
    assert (job.tools, job.params.structured_outputs) == (None, None)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "f"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "tool_choice"),
        ({"tools": TOOLS, "structured_outputs": {"choice": ["a"]}}, "tools"),
        ({"tools": TOOLS, "structured_outputs": {"json_object": True}, "record": LLAMA}, "tools"),
        ({"tools": STRICT, "min_tokens": 2}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "", "strict": True}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [], "strict": True}}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required", "record": PoolRecord("m", "m")}, "tools"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused_by_name(options: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        made(**options)
    assert caught.value.param == param
    assert caught.value.message.startswith(param)
