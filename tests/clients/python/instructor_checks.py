"""instructor: records by tool calls, by JSON schemas and over the Responses API.

Its modes MD_JSON and PARALLEL_TOOLS ask in words only, so whether a record comes depends on the model. Their checks
make the demo model say what the mode asks for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
from clients.python.checks import (
    API,
    KEY,
    MODEL,
    TOO_LONG,
    check,
    error_of,
    main,
    newest_job,
    user,
    wait_until_newest_job_is_cancelled,
)
from clients.python.river import ASK_RIVER, River
from instructor.core import InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field, create_model

Mode = instructor.Mode
MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.FUNCTIONS, Mode.JSON_SCHEMA, Mode.JSON_O1)
RESPONSES_MODES = (Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS)
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_tokens": 200, "max_retries": 0}
GREEDY_RESPONSE: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 200, "max_retries": 0}
ASK_USER = "Extract: Bob is 25 years old and lives in Oslo."
NUM_STATIONS = 400
_stations: Any = {f"station_{n}": (Literal["open", "shut"], ...) for n in range(NUM_STATIONS)}
Stations: Any = create_model("Stations", **_stations)
"""A record whose JSON is long enough to be canceled."""


class Address(BaseModel):
    """An address. Its schema does not say `additionalProperties`, as pydantic's schemas usually do not."""

    city: Literal["Oslo", "Bergen"]
    zip: Literal["0150", "5003"] | None = None


class User(BaseModel):
    """A user."""

    name: Literal["Ann", "Bob"]
    age: int = Field(ge=0, le=150)
    address: Address
    tags: list[Literal["new", "old"]] = Field(default=[], max_length=2)


class AnyObject(BaseModel):
    """A record of every JSON object."""

    model_config = ConfigDict(extra="allow")


def patched(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=API, api_key=KEY, max_retries=0), mode=mode)


@check
def record_is_made_in_each_mode() -> None:
    for mode in MODES:
        river, raw = patched(mode).chat.completions.create_with_completion(
            response_model=River, messages=user(ASK_RIVER), **GREEDY
        )
        assert isinstance(river, River), mode
        assert raw.usage.completion_tokens > 0


@check
def dumped_history_is_sent_back() -> None:
    for mode in MODES:
        completions = patched(mode).chat.completions
        asked = {"response_model": River, **GREEDY}
        _, raw = completions.create_with_completion(messages=user(ASK_RIVER), **asked)
        message = raw.choices[0].message.model_dump()
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message["tool_calls"] or ()
        ]
        messages = [*user(ASK_RIVER), message, *results, *user("Another one.")]
        assert isinstance(completions.create(messages=messages, **asked), River), mode


@check
def partial_records_are_streamed() -> None:
    for mode in MODES:
        *_, last = patched(mode).chat.completions.create_partial(
            response_model=River, messages=user(ASK_RIVER), **GREEDY
        )
        River.model_validate(last.model_dump())


@check
def partial_records_grow_over_several_events() -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        partial = [
            *patched(mode).chat.completions.create_partial(response_model=User, messages=user(ASK_USER), **GREEDY)
        ]
        shown = [record.model_dump(exclude_none=True) for record in partial]
        assert any("name" in record and not record["address"] for record in shown), (mode, shown)
        User.model_validate(partial[-1].model_dump())


@check
def nested_records_with_open_schemas_are_made_in_each_mode() -> None:
    for mode in MODES:
        made = patched(mode).chat.completions.create(response_model=User, messages=user(ASK_USER), **GREEDY)
        assert isinstance(made, User), mode


@check
def json_mode_makes_an_object() -> None:
    made, raw = patched(Mode.JSON).chat.completions.create_with_completion(
        response_model=AnyObject, messages=user('Answer: {"name": "Oder"}'), **GREEDY
    )
    assert made.model_dump() == json.loads(raw.choices[0].message.content)


@check
def record_is_read_from_a_fenced_block() -> None:
    fenced = r'```json\n\{"name": "(Oder|Elbe|Warta)", "is_navigable": (true|false)\}\n```'
    asked: Any = {"messages": user(ASK_RIVER), "extra_body": {"structured_outputs": {"regex": fenced}}, **GREEDY}
    completions = patched(Mode.MD_JSON).chat.completions
    assert isinstance(completions.create(response_model=River, **asked), River)
    *_, last = completions.create_partial(response_model=River, **asked)
    River.model_validate(last.model_dump())


@check
def records_are_made_by_parallel_calls() -> None:
    completions = patched(Mode.PARALLEL_TOOLS).chat.completions
    asked: Any = {"response_model": Iterable[River | Address], "messages": user(ASK_RIVER), **GREEDY}
    made = [*completions.create(extra_body={"tool_choice": "required"}, **asked)]
    assert made and all(isinstance(record, River | Address) for record in made)


@check
def responses_api_makes_a_record() -> None:
    for mode in RESPONSES_MODES:
        for asked, kind in ((ASK_RIVER, River), (ASK_USER, User)):
            made = patched(mode).responses.create(input=asked, response_model=kind, **GREEDY_RESPONSE)
            assert isinstance(made, kind), mode


@check
def responses_api_streams_partial_records() -> None:
    *_, last = patched(Mode.RESPONSES_TOOLS).responses.create_partial(
        input=ASK_USER, response_model=User, **GREEDY_RESPONSE
    )
    User.model_validate(last.model_dump())


@check
def errors_are_those_of_the_client() -> None:
    def refusal(**wrong: Any) -> Any:
        asked = {"messages": user("x"), **GREEDY, **wrong}
        create = patched(Mode.TOOLS).chat.completions.create
        return error_of(InstructorRetryException, lambda: create(response_model=River, **asked)).__cause__

    assert "absent" in str(refusal(model="absent"))
    assert "maximum context length" in str(refusal(messages=user(TOO_LONG)))


@check
async def canceled_call_cancels_its_job() -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(base_url=API, api_key=KEY), mode=Mode.JSON_SCHEMA)
    before = newest_job()["id"]
    asked = {"response_model": Stations, "messages": user("Which are open?"), **GREEDY, "max_tokens": 6000}
    call = asyncio.ensure_future(client.chat.completions.create(**asked))
    while newest_job()["id"] == before:
        await asyncio.sleep(0.1)
    call.cancel()
    await asyncio.wait([call])
    await asyncio.to_thread(wait_until_newest_job_is_cancelled)


if __name__ == "__main__":
    main("instructor", "openai")
