"""openai-agents: its runner over the Responses API, its default, and over chat completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
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
from clients.python.river import ASK_LENGTH, ASK_RIVER, Name, River
from clients.python.river import length_of as length_in_km

set_tracing_disabled(True)


def agents(
    *, max_tokens: int = 200, model: str = MODEL, tool_choice: str | None = None, **options: Any
) -> Iterator[Any]:
    """Yield the same agent over each API. It does not accept an answer that `max_tokens` ended."""
    client = openai.AsyncOpenAI(base_url=API, api_key=KEY, max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=max_tokens, store=True, tool_choice=tool_choice)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        yield Agent(name="guide", model=kind(model, client), model_settings=settings, **options)


@check
async def agent_answers_with_text_and_usage() -> None:
    for agent in agents():
        result = await Runner.run(agent, QUESTION)
        assert result.final_output
        assert result.context_wrapper.usage.output_tokens > 0


@check
async def stream_has_the_text_of_the_whole_answer() -> None:
    for agent in agents():
        stream = Runner.run_streamed(agent, QUESTION)
        events = [event.data async for event in stream.stream_events() if event.type == "raw_response_event"]
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == (await Runner.run(agent, QUESTION)).final_output == stream.final_output != ""


@check
async def history_is_sent_back() -> None:
    for agent in agents(instructions="Be short.", output_type=River):
        first = await Runner.run(agent, ASK_RIVER)
        again = [*first.to_input_list(), {"role": "user", "content": "Another one."}]
        assert isinstance((await Runner.run(agent, again)).final_output, River)


@check
async def stored_response_is_continued() -> None:
    agent = next(agents(output_type=River))
    first = await Runner.run(agent, ASK_RIVER)
    second = await Runner.run(agent, "Another one.", previous_response_id=first.last_response_id)
    assert isinstance(second.final_output, River)


@check
async def agent_calls_a_tool_and_goes_on() -> None:
    called: list[str] = []

    @function_tool(is_enabled=lambda _context, _agent: not called)
    def length_of(name: Name) -> str:
        """Return the length of a river."""
        called.append(name)
        return length_in_km(name)

    for agent in agents(max_tokens=1000, tool_choice="required", tools=[length_of]):
        called.clear()
        result = await Runner.run(agent, ASK_LENGTH)
        assert called
        assert result.final_output


@check
async def output_is_a_record() -> None:
    for agent in agents(output_type=River):
        assert isinstance((await Runner.run(agent, ASK_RIVER)).final_output, River)


@check
def errors_are_those_of_the_client() -> None:
    for agent in agents(model="absent"):
        error_of(openai.NotFoundError, partial(Runner.run_sync, agent, "x"))
    for agent in agents():
        too_long = error_of(openai.BadRequestError, partial(Runner.run_sync, agent, TOO_LONG))
        assert too_long.code == "context_length_exceeded"


@check
async def canceled_run_cancels_its_job() -> None:
    for agent in agents(max_tokens=LONG_STORY_TOKENS):
        stream = Runner.run_streamed(agent, STORY)
        async for event in stream.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                stream.cancel()
        await asyncio.to_thread(wait_until_newest_job_is_cancelled)


if __name__ == "__main__":
    main("openai-agents", "openai")
