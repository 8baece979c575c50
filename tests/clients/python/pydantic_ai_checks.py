"""pydantic-ai: agents over chat completions and over the Responses API, its default for OpenAI."""

from __future__ import annotations

import asyncio
from typing import Any

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
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=API, api_key=KEY)
chat: Any = OpenAIChatModel(MODEL, provider=provider)
responses: Any = OpenAIResponsesModel(MODEL, provider=provider)
SHORT: Any = {"temperature": 0, "max_tokens": 24}
LONGER: Any = {"temperature": 0, "max_tokens": 200}


class CallFirst(AbstractCapability[None]):
    """Forces a call in the first step, and forbids calls afterwards."""

    def get_model_settings(self) -> Any:
        return lambda context: {"tool_choice": "required" if context.run_step <= 1 else "none"}


@check
def agent_answers_with_text_and_usage() -> None:
    for model in (chat, responses):
        result = Agent(model, model_settings=SHORT).run_sync(QUESTION)
        assert result.output
        assert result.usage.output_tokens == 24


@check
def history_is_sent_back() -> None:
    agent = Agent(chat, model_settings={**LONGER, "openai_reasoning_effort": "none"}, system_prompt="Be short.")
    first = agent.run_sync(ASK_RIVER)
    assert agent.run_sync("Another one.", message_history=first.all_messages()).output


@check
async def streamed_answer_has_the_text_of_the_whole_one() -> None:
    for model in (chat, responses):
        agent = Agent(model, model_settings=SHORT)
        async with agent.run_stream(QUESTION) as stream:
            text = "".join([piece async for piece in stream.stream_text(delta=True)])
        assert text == (await agent.run(QUESTION)).output != ""


@check
def agent_calls_a_tool_and_goes_on() -> None:
    for model in (chat, responses):
        agent = Agent(model, model_settings=LONGER, tools=[length_of], capabilities=[CallFirst()])
        result = agent.run_sync(ASK_LENGTH)
        kinds = [part.part_kind for message in result.all_messages() for part in message.parts]
        assert kinds.count("tool-return") >= 1, kinds
        assert result.output


@check
def output_is_a_record_by_each_method() -> None:
    for model in (chat, responses):
        for wanted in (NativeOutput(River), ToolOutput(River)):
            agent: Any = Agent(model, output_type=wanted, model_settings=LONGER, retries=0)
            assert isinstance(agent.run_sync(ASK_RIVER).output, River), wanted


@check
def errors_are_those_of_the_client() -> None:
    absent = Agent(OpenAIChatModel("absent", provider=provider))
    assert error_of(ModelHTTPError, lambda: absent.run_sync("x")).status_code == 404
    too_long = error_of(ModelHTTPError, lambda: Agent(chat).run_sync(TOO_LONG))
    assert too_long.body["code"] == "context_length_exceeded"


@check
async def left_stream_cancels_its_job() -> None:
    agent = Agent(chat, model_settings={**SHORT, "max_tokens": LONG_STORY_TOKENS})
    async with agent.run_stream(STORY) as stream:
        await anext(stream.stream_text(delta=True))
        await stream.cancel()
    await asyncio.to_thread(wait_until_newest_job_is_cancelled)


if __name__ == "__main__":
    main("pydantic-ai-slim", "openai")
