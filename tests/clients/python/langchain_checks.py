"""LangChain's `langchain-openai`, over chat completions and over the Responses API."""

from __future__ import annotations

from typing import Any

import openai
from clients.python.checks import (
    API,
    KEY,
    LONG_STORY_TOKENS,
    MODEL,
    QUESTION,
    STORY,
    TOO_LONG,
    check,
    error_of,
    main,
    wait_until_newest_job_is_cancelled,
)
from clients.python.river import ASK_LENGTH, ASK_RIVER, River, length_of
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

length_tool = tool(length_of)


def model(*, max_tokens: int = 200, **options: Any) -> Any:
    return ChatOpenAI(
        model=MODEL, base_url=API, api_key=KEY, temperature=0, max_retries=0, max_tokens=max_tokens, **options
    )


@check
def model_answers_with_text_and_usage() -> None:
    hints = {"reasoning_effort": "low", "verbosity": "low", "service_tier": "flex", "store": True}
    answer = model(max_tokens=24, **hints).invoke([HumanMessage(QUESTION, name="ann")])
    assert answer.text
    assert answer.usage_metadata["output_tokens"] == 24


@check
def streamed_answer_has_the_text_and_usage_of_the_whole_one() -> None:
    short = model(max_tokens=24, stream_usage=True)
    pieces = list(short.stream(QUESTION))
    assert "".join(piece.text for piece in pieces) == short.invoke(QUESTION).text != ""
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) == 24


@check
def forced_call_is_answered_in_a_second_request() -> None:
    calls_then_text(model())


@check
def forced_call_over_the_responses_api_is_answered_in_a_second_request() -> None:
    calls_then_text(model(use_responses_api=True))


def calls_then_text(llm: Any) -> None:
    messages = [HumanMessage(ASK_LENGTH)]
    forced = llm.bind_tools([length_tool], tool_choice="required", strict=True, parallel_tool_calls=False)
    first = forced.invoke(messages)
    (call,) = first.tool_calls
    second = llm.bind_tools([length_tool], tool_choice="none").invoke([*messages, first, length_tool.invoke(call)])
    assert second.text
    assert not second.tool_calls


@check
def structured_output_is_a_record_by_each_method() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(model().with_structured_output(River, method=method).invoke(ASK_RIVER), River), method


@check
def responses_api_answers_and_streams_the_same_text() -> None:
    llm = model(max_tokens=24, use_responses_api=True, output_version="responses/v1")
    assert "".join(piece.text for piece in llm.stream(QUESTION)) == llm.invoke(QUESTION).text != ""


@check
def errors_are_those_of_the_client() -> None:
    error_of(openai.NotFoundError, lambda: model().bind(model="absent").invoke("x"))
    too_long = error_of(openai.BadRequestError, lambda: model().invoke(TOO_LONG))
    assert too_long.code == "context_length_exceeded"


@check
def closed_stream_cancels_its_job() -> None:
    stream = model(max_tokens=LONG_STORY_TOKENS).stream(STORY)
    next(stream)
    stream.close()
    wait_until_newest_job_is_cancelled()


if __name__ == "__main__":
    main("langchain-openai", "openai")
