"""Required tool calls by the real small model as a user serves it, through OpenAI's client.

Whatever is sampled, each call is to a permitted function, with arguments that match its schema.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pytest
from fakes.served_model import TOOL_TEMPLATE, served
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

MODEL = "caller"
NUM_SEEDS = 2
NUM_CHOICES = 8


class Location(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    city: Annotated[str, StringConstraints(min_length=1, max_length=20)]
    country: Literal["Poland", "Italy", "Österreich"]


class Weather(BaseModel):
    """Tells what weather comes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    place: Location
    days: int = Field(ge=1, le=14)
    unit: Literal["celsius", "fahrenheit"] | None


class Gates(BaseModel):
    """Opens and closes gates."""

    model_config = ConfigDict(extra="forbid", strict=True)

    opened: list[Literal["north", "south", "mill"]] = Field(max_length=3)
    level_m: float = Field(ge=0, le=40)
    now: bool


class Stop(BaseModel):
    """Stops the turbine."""

    model_config = ConfigDict(extra="forbid", strict=True)


FUNCTIONS: dict[str, type[BaseModel]] = {"weather": Weather, "gates": Gates, "stop": Stop}
Answer = tuple[list[tuple[str, str]], str | None, str]
"""Name and arguments of each call, the text beside them and what ended it."""


def tool(name: str, **more: object) -> dict[str, Any]:
    model = FUNCTIONS[name]
    described = {"name": name, "description": model.__doc__, "parameters": model.model_json_schema()}
    return {"type": "function", "function": described | more}


@pytest.fixture(scope="module")
def api(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("models") / MODEL
    shutil.copytree(demo_folder, folder, copy_function=os.symlink)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    with served(folder) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(api: openai.OpenAI, asked: str, *, stream: bool, **options: Any) -> list[Answer]:
    """Return the calls of dozens of samples."""
    answers = []
    for seed in range(NUM_SEEDS):
        common = {"messages": [{"role": "user", "content": asked}], "tools": [tool(name) for name in FUNCTIONS]}
        common |= {"temperature": 1, "max_tokens": 1500, "n": NUM_CHOICES, "seed": seed, "stream": stream}
        said = api.chat.completions.create(model=MODEL, **common | options)
        answers += _streamed(said) if stream else [_whole(choice) for choice in said.choices]
    assert len(answers) == NUM_SEEDS * NUM_CHOICES
    return answers


def _whole(choice: Any) -> Answer:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return calls, choice.message.content, choice.finish_reason


def _streamed(pieces: Any) -> list[Answer]:
    choices = [piece.choices[0] for piece in pieces]
    answers = []
    for index in range(NUM_CHOICES):
        own = [choice for choice in choices if choice.index == index]
        calls = [call for choice in own for call in choice.delta.tool_calls or ()]
        assert [call.index for call in calls] == list(range(len(calls)))
        said = [(call.function.name, call.function.arguments) for call in calls]
        answers.append((said, "".join(choice.delta.content or "" for choice in own) or None, own[-1].finish_reason))
    return answers


def check(answer: Answer, end: str) -> None:
    calls, text, finish_reason = answer
    assert calls and (text, finish_reason) == (None, end)
    for name, arguments in calls:
        FUNCTIONS[name].model_validate_json(arguments)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_is_calls_where_they_are_required(api: openai.OpenAI, stream: bool, parallel: bool) -> None:
    options = {"tool_choice": "required", "parallel_tool_calls": parallel}
    answers = ask(api, "What will the weather be in Rome?", stream=stream, **options)
    for answer in answers:
        check(answer, "tool_calls")
        assert parallel or len(answer[0]) == 1
    assert len({call for calls, *_ in answers for call in calls}) > len(answers) // 2


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_is_a_call_of_the_function_that_is_named(api: openai.OpenAI, stream: bool, name: str) -> None:
    named = {"type": "function", "function": {"name": name}}
    for answer in ask(api, "What will the weather be in Rome?", stream=stream, tool_choice=named):
        check(answer, "stop")
        assert [called for called, _ in answer[0]] == [name]


@pytest.mark.parametrize("stream", [False, True])
def test_voluntary_calls_match_the_schemas_of_strict_functions(api: openai.OpenAI, stream: bool) -> None:
    call = {"name": "weather", "arguments": '{"place": {"city": "Turin", "country": "Italy"}, "days": 2, "unit": null}'}
    messages = [
        {"role": "user", "content": "What will the weather be in Turin?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
        {"role": "user", "content": "What will the weather be in Rome?"},
    ]
    tools = [tool(name, strict=True) for name in FUNCTIONS]
    answers = ask(api, "", stream=stream, messages=messages, tools=tools, max_tokens=120)
    called = [answer for answer in answers if answer[0]]
    assert called
    for calls, _, _ in called:
        for name, arguments in calls:
            FUNCTIONS[name].model_validate_json(arguments)
