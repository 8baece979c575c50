"""litellm: its OpenAI provider, its bridges to and from the Responses API, and its Anthropic provider."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import httpx
from clients.python.checks import (
    API,
    KEY,
    LONG_STORY_TOKENS,
    MODEL,
    QUESTION,
    STORY,
    TOO_LONG,
    URL,
    check,
    error_of,
    main,
    user,
    wait_until_newest_job_is_cancelled,
)
from clients.python.river import ASK_LENGTH, ASK_RIVER, LENGTH_TOOL, River, length_of

# Otherwise litellm fetches a list of prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
from litellm.llms.anthropic.files.handler import AnthropicFilesHandler

GREEDY = {"model": f"openai/{MODEL}", "api_base": API, "api_key": KEY, "temperature": 0, "max_tokens": 24}


def complete(**options: Any) -> Any:
    return litellm.completion(**{"num_retries": 0, **GREEDY, **options})


@check
def completion_has_text_and_usage() -> None:
    answer = complete(messages=user(QUESTION))
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 24


@check
def streamed_completion_has_the_text_of_the_whole_one() -> None:
    whole = complete(messages=user(QUESTION))
    pieces = list(complete(messages=user(QUESTION), stream=True, stream_options={"include_usage": True}))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


@check
def dumped_history_with_a_call_is_sent_back() -> None:
    asked = {"tools": [LENGTH_TOOL], "max_tokens": 200, "parallel_tool_calls": False}
    first = complete(messages=user(ASK_LENGTH), tool_choice="required", **asked).choices[0].message
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "name": "length_of"}
    result["content"] = length_of(**json.loads(call.function.arguments))
    messages = [*user(ASK_LENGTH), first.model_dump(), result]
    second = complete(messages=messages, tool_choice="none", **asked)
    assert second.choices[0].message.content


@check
def response_format_is_followed() -> None:
    answer = complete(messages=user(ASK_RIVER), response_format=River, max_tokens=200)
    River.model_validate_json(answer.choices[0].message.content)


@check
def responses_are_asked_for_directly() -> None:
    asked = {"model": f"openai/{MODEL}", "api_base": API, "api_key": KEY, "max_output_tokens": 24}
    response: Any = litellm.responses(input=QUESTION, **asked)
    assert response.output[0].content[0].text
    kinds = [event.type for event in litellm.responses(input=QUESTION, stream=True, **asked)]
    assert kinds[-1] in ("response.completed", "response.incomplete"), kinds


@check
def chat_is_bridged_to_responses() -> None:
    answer = complete(model=f"openai/responses/{MODEL}", messages=user(QUESTION))
    assert answer.choices[0].message.content


@check
def anthropic_provider_answers() -> None:
    answer = complete(model=f"anthropic/{MODEL}", api_base=URL, messages=user(QUESTION))
    assert answer.choices[0].message.content


@check
def message_batch_is_retrieved_with_its_results() -> None:
    """litellm makes no message batches, but retrieves them and their results in OpenAI's shape.

    `litellm.file_content` of 1.83 asks Anthropic's Files API for the results, which has none of them.
    """
    params = {"model": MODEL, "max_tokens": 24, "messages": user(QUESTION)}
    made = httpx.post(f"{URL}/v1/messages/batches", json={"requests": [{"custom_id": "one", "params": params}]}).json()
    asked: Any = {"custom_llm_provider": "anthropic", "api_base": URL, "api_key": KEY}
    while (batch := litellm.retrieve_batch(made["id"], **asked)).status != "completed":
        time.sleep(0.2)
    assert batch.request_counts.completed == 1
    wanted: Any = {"file_id": batch.output_file_id}
    content: Any = AnthropicFilesHandler().file_content(False, wanted, api_base=URL, api_key=KEY)
    (line,) = map(json.loads, content.text.splitlines())
    assert line["custom_id"] == "one" and line["response"]["body"]["choices"][0]["message"]["content"]


@check
def fallback_for_a_long_context_is_used() -> None:
    error_of(litellm.ContextWindowExceededError, lambda: complete(messages=user(TOO_LONG)))
    deployment = {"model": f"openai/{MODEL}", "api_base": API, "api_key": KEY, "max_tokens": 8}
    short = {**deployment, "extra_body": {"truncate_prompt_tokens": 1000}}
    router = litellm.Router(
        [{"model_name": "small", "litellm_params": deployment}, {"model_name": "large", "litellm_params": short}],
        context_window_fallbacks=[{"small": ["large"]}],
        num_retries=0,
    )
    answer: Any = router.completion(model="small", messages=user(TOO_LONG))
    assert answer.choices[0].message.content is not None


@check
def errors_are_those_of_the_client() -> None:
    error_of(litellm.NotFoundError, lambda: complete(messages=user("x"), model="openai/absent"))
    error_of(litellm.BadRequestError, lambda: complete(messages=user("x"), top_p=9))


@check
async def closed_stream_cancels_its_job() -> None:
    asked = {**GREEDY, "max_tokens": LONG_STORY_TOKENS}
    stream: Any = await litellm.acompletion(messages=user(STORY), stream=True, **asked)
    await anext(aiter(stream))
    await stream.aclose()
    await asyncio.to_thread(wait_until_newest_job_is_cancelled)


if __name__ == "__main__":
    main("litellm", "openai")
