"""instructor: records by tool calls, by JSON schemas and over the Responses API."""

from __future__ import annotations

import asyncio
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
from pydantic import create_model

MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_tokens": 200, "max_retries": 0}
NUM_STATIONS = 400
_stations: Any = {f"station_{n}": (Literal["open", "shut"], ...) for n in range(NUM_STATIONS)}
Stations: Any = create_model("Stations", **_stations)
"""A record whose JSON is long enough to be canceled."""


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
def responses_api_makes_a_record() -> None:
    responses = patched(instructor.Mode.RESPONSES_TOOLS).responses
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 200, "max_retries": 0}
    assert isinstance(responses.create(input=ASK_RIVER, response_model=River, **asked), River)


@check
def errors_are_those_of_the_client() -> None:
    def refusal(**wrong: Any) -> Any:
        asked = {"messages": user("x"), **GREEDY, **wrong}
        create = patched(instructor.Mode.TOOLS).chat.completions.create
        return error_of(InstructorRetryException, lambda: create(response_model=River, **asked)).__cause__

    assert "absent" in str(refusal(model="absent"))
    assert "maximum context length" in str(refusal(messages=user(TOO_LONG)))


@check
async def canceled_call_cancels_its_job() -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(base_url=API, api_key=KEY), mode=instructor.Mode.JSON_SCHEMA)
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
