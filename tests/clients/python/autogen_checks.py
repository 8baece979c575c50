"""AutoGen: its OpenAI model client and its assistant agent, whose messages have names by default."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.models import AssistantMessage, FunctionExecutionResult, FunctionExecutionResultMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from clients.python.checks import (
    API,
    KEY,
    LONG_STORY_TOKENS,
    MODEL,
    QUESTION,
    STORY,
    TOO_LONG,
    check,
    main,
    newest_job,
    wait_until_newest_job_is_cancelled,
)
from clients.python.river import ASK_LENGTH, ASK_RIVER, River, length_of

CAPABILITIES: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
}


def client(*, model: str = MODEL, max_tokens: int = 200) -> Any:
    return OpenAIChatCompletionClient(
        model=model,
        base_url=API,
        api_key=KEY,
        temperature=0,
        max_tokens=max_tokens,
        max_retries=0,
        parallel_tool_calls=False,
        model_info=CAPABILITIES,
    )


def user(text: str) -> UserMessage:
    return UserMessage(content=text, source="ann")


@check
async def client_answers_with_text_and_usage() -> None:
    result = await client(max_tokens=24).create([user(QUESTION)])
    assert result.content
    assert result.usage.completion_tokens == 24


@check
async def streamed_answer_has_the_text_and_usage_of_the_whole_one() -> None:
    short = client(max_tokens=24)
    whole = await short.create([user(QUESTION)])
    *pieces, last = [piece async for piece in short.create_stream([user(QUESTION)], include_usage=True)]
    assert "".join(pieces) == last.content == whole.content
    assert last.usage.completion_tokens == 24


@check
async def forced_call_is_answered_in_a_second_request() -> None:
    tool, llm = FunctionTool(length_of, description="Return the length of a river."), client()
    first = await llm.create([user(ASK_LENGTH)], tools=[tool], tool_choice="required")
    (call,) = first.content
    assert (first.finish_reason, call.name) == ("function_calls", "length_of")
    returned = length_of(**json.loads(call.arguments))
    result = FunctionExecutionResult(content=returned, call_id=call.id, is_error=False, name=call.name)
    history = [
        user(ASK_LENGTH),
        AssistantMessage(content=first.content, source="guide"),
        FunctionExecutionResultMessage(content=[result]),
    ]
    second = await llm.create(history, tools=[tool], tool_choice="none")
    assert isinstance(second.content, str)
    assert second.content


@check
async def output_is_a_record() -> None:
    result = await client().create([user(ASK_RIVER)], json_output=River)
    River.model_validate_json(result.content)


@check
async def agent_answers_twice_in_one_conversation() -> None:
    agent = AssistantAgent("guide", model_client=client(max_tokens=24))
    for task in (ASK_RIVER, "Another one."):
        assert (await agent.run(task=task)).messages[-1].to_text()


@check
async def errors_are_those_of_the_client() -> None:
    for wrong, model, kind in ((QUESTION, "absent", openai.NotFoundError), (TOO_LONG, MODEL, openai.BadRequestError)):
        try:
            await client(model=model).create([user(wrong)])
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}")


@check
async def canceled_call_cancels_its_job() -> None:
    token, before = CancellationToken(), newest_job()["id"]
    asked = client(max_tokens=LONG_STORY_TOKENS).create([user(STORY)], cancellation_token=token)
    call = asyncio.ensure_future(asked)
    while newest_job()["id"] == before:
        await asyncio.sleep(0.05)
    token.cancel()
    await asyncio.wait([call])
    await asyncio.to_thread(wait_until_newest_job_is_cancelled)


if __name__ == "__main__":
    main("autogen-ext", "autogen-agentchat", "openai")
