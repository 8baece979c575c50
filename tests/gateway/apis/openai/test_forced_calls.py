"""Required tool calls over HTTP, by a real small model with random sampling: each call is to one of the tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from fakes.cover import each_value
from fixtures.tiny_model import make_tiny_model
from pydantic import BaseModel, ConfigDict, Field

from penstock.gpu_node.engine import Engine, EngineConfig

MARKS = {"hermes": "<tool_call>", "llama3_json": "ipython", "mistral": "[TOOL_CALLS]"}
"""By which a node tells the form in a chat template."""
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    city: Literal["Łódź", "Rome"]
    days: int = Field(ge=1, le=14)


class Open(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    gates: list[Literal["north", "south"]] = Field(max_length=3)
    wide: bool


class Stop(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


FUNCTIONS: dict[str, type[BaseModel]] = {"weather": Weather, "open": Open, "stop": Stop}


def tool(name: str, **more: object) -> dict[str, Any]:
    """`stop` has no parameters at all."""
    schema = {} if name == "stop" else {"parameters": FUNCTIONS[name].model_json_schema()}
    return {"type": "function", "function": {"name": name, **schema, **more}}


TOOLS = [tool(name) for name in FUNCTIONS]


@pytest.fixture(scope="module")
def gateway_url(stack, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A gateway in front of one node for each form."""
    for form, mark in MARKS.items():
        folder = make_tiny_model(tmp_path_factory.mktemp("models") / form)
        (folder / "chat_template.jinja").write_text(TEMPLATE + f"{{# {mark} #}}")
        engine = Engine(
            EngineConfig(model=str(folder), dtype="bfloat16", num_kv_blocks=400, num_threads=1, weight_cache=False)
        )
        stack.start_node(engine, model=form, pool=form)
    return stack.start_gateway()


@pytest.fixture
def api(gateway_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(api: openai.OpenAI, form: str, **options: Any) -> Any:
    asked = {"messages": [{"role": "user", "content": "the gate"}], "tools": TOOLS, "max_tokens": 900, "temperature": 2}
    return api.chat.completions.create(model=form, **asked | options)


def check(calls: list[Any]) -> None:
    assert calls
    for call in calls:
        FUNCTIONS[call.function.name].model_validate_json(call.function.arguments)
    assert len({call.id for call in calls}) == len(calls)


def joined(parts: list[Any]) -> list[Any]:
    """Return whole calls: the first part of a call has its id and name, and all parts have arguments."""
    calls: list[Any] = []
    for part in parts:
        if part.id:
            calls.append(part)
        else:
            assert (part.index, part.function.name) == (calls[-1].index, None)
            calls[-1].function.arguments += part.function.arguments
    return calls


# The engine's test_call_grammar.py draws texts of every form.
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form == "hermes" else pytest.mark.slow) for form in MARKS]
)
def test_a_required_call_is_valid_whatever_is_drawn(api: openai.OpenAI, form: str) -> None:
    choices = [choice for seed in range(3) for choice in ask(api, form, tool_choice="required", n=8, seed=seed).choices]
    for choice in choices:
        check(choice.message.tool_calls)
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert {call.function.name for choice in choices for call in choice.message.tool_calls} == set(FUNCTIONS)
    assert max(len(choice.message.tool_calls) for choice in choices) > 1
    for choice in ask(api, form, tool_choice="required", parallel_tool_calls=False, n=8).choices:
        assert len(choice.message.tool_calls) == 1
        check(choice.message.tool_calls)


@pytest.mark.parametrize(
    ("form", "choice"), each_value(MARKS, ["required", {"type": "function", "function": {"name": "open"}}])
)
def test_stream_has_the_same_calls(api: openai.OpenAI, form: str, choice: Any) -> None:
    options = {"tool_choice": choice, "n": 4, "seed": 5}
    whole = ask(api, form, **options).choices
    pieces = [piece.choices[0] for piece in ask(api, form, stream=True, **options)]
    for one in whole:
        own = [piece for piece in pieces if piece.index == one.index]
        calls = joined([call for piece in own for call in piece.delta.tool_calls or ()])
        check(calls)
        said = [(call.function.name, call.function.arguments) for call in one.message.tool_calls]
        assert [(call.function.name, call.function.arguments) for call in calls] == said
        assert [call.index for call in calls] == list(range(len(calls)))
        assert not any(piece.delta.content for piece in own)
        assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + [one.finish_reason]


@pytest.mark.parametrize("form", MARKS)
def test_a_named_function_is_called_once_and_ends_as_openai_has_it(api: openai.OpenAI, form: str) -> None:
    for name in FUNCTIONS:
        named = {"type": "function", "function": {"name": name}}
        for choice in ask(api, form, tool_choice=named, n=4).choices:
            assert [call.function.name for call in choice.message.tool_calls] == [name]
            check(choice.message.tool_calls)
            assert choice.finish_reason == "stop"


def test_call_cut_by_max_tokens_is_no_call_and_ends_by_length(api: openai.OpenAI) -> None:
    (choice,) = ask(api, "hermes", tool_choice="required", max_tokens=5).choices
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "length")


@pytest.mark.parametrize("form", MARKS)
def test_strict_functions_leave_the_model_free(api: openai.OpenAI, form: str) -> None:
    (choice,) = ask(api, form, tools=[tool(name, strict=True) for name in FUNCTIONS], max_tokens=20, seed=1).choices
    assert choice.message.content and choice.message.tool_calls is None


def test_answer_is_calls_or_the_requested_structured_output(api: openai.OpenAI) -> None:
    asked = {"tools": [tool(name, strict=True) for name in FUNCTIONS], "response_format": Weather, "seed": 3, "n": 8}
    asked |= {"messages": [{"role": "user", "content": "the gate"}], "max_tokens": 900}
    choices = [
        choice for form in ("hermes", "mistral") for choice in api.chat.completions.parse(model=form, **asked).choices
    ]
    assert {choice.finish_reason for choice in choices} == {"stop", "tool_calls"}
    for choice in choices:
        if choice.finish_reason == "stop":
            assert isinstance(choice.message.parsed, Weather) and not choice.message.tool_calls
        else:
            check(choice.message.tool_calls)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "text"}}}},
            "response_format.json_schema",
        )
    ],
)
def test_refusal_by_a_node_names_the_callers_field(api: openai.OpenAI, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="hermes", messages=[{"role": "user", "content": "x"}], **options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "open", "bogus": 1}}}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "open"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "tools": openai.NOT_GIVEN}, "tool_choice"),
        ({"tool_choice": "required", "extra_body": {"min_tokens": 3}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [tool("open", parameters={"type": "array"})]}, "tools"),
        ({"tools": [tool("open", parameters={"not": {}}, strict=True)]}, "tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unenforceable_tool_choice_is_refused_by_field(
    api: openai.OpenAI, options: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(api, "hermes", stream=stream, **options)
    assert caught.value.param == param
