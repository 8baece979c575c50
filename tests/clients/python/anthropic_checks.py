"""The official `anthropic` package."""

from __future__ import annotations

import json
import time
from typing import Any

import anthropic
from clients.python.checks import (
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
from clients.python.river import ASK_LENGTH, ASK_RIVER, LENGTH_PARAMETERS, River, length_of

client: Any = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=120)
GREEDY = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0}}
TOOL = {"name": "length_of", "description": "Return the length of a river.", "input_schema": LENGTH_PARAMETERS}


def num_input_tokens(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens)


@check
def message_has_text_and_usage() -> None:
    message = client.messages.create(messages=user(QUESTION), **GREEDY)
    assert message.content[0].text
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 24)


@check
def streamed_message_has_the_text_of_the_whole_one() -> None:
    whole = client.messages.create(messages=user(QUESTION), **GREEDY)
    with client.messages.stream(messages=user(QUESTION), **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens


@check
def tokens_are_counted_as_the_usage_has_them() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=user(QUESTION), tools=[TOOL])
    message = client.messages.create(messages=user(QUESTION), tools=[TOOL], **GREEDY)
    assert counted.input_tokens == num_input_tokens(message.usage)


@check
def forced_call_is_answered_in_a_second_request() -> None:
    asked = {**GREEDY, "max_tokens": 200, "tools": [TOOL]}
    first = client.messages.create(
        messages=user(ASK_LENGTH), tool_choice={"type": "any", "disable_parallel_tool_use": True}, **asked
    )
    (call,) = first.content
    assert (first.stop_reason, call.name) == ("tool_use", "length_of")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": length_of(**call.input)}
    messages = [*user(ASK_LENGTH), first.to_param(), {"role": "user", "content": [result]}]
    second = client.messages.create(messages=messages, tool_choice={"type": "none"}, **asked)
    assert second.content[0].text


@check
def output_format_is_followed() -> None:
    schema = River.model_json_schema()
    config = {"format": {"type": "json_schema", "schema": schema}}
    asked = {**GREEDY, "max_tokens": 200, "extra_body": {"temperature": 0, "output_config": config}}
    message = client.messages.create(messages=user(ASK_RIVER), **asked)
    River.model_validate(json.loads(message.content[0].text))


@check
def message_batch_has_the_results_of_messages() -> None:
    params = {"model": MODEL, "max_tokens": 24, "messages": user(QUESTION), "temperature": 0}
    wrong = {**params, "model": "absent"}
    batch = client.messages.batches.create(
        requests=[{"custom_id": "one", "params": params}, {"custom_id": "two", "params": wrong}]
    )
    assert batch.processing_status == "in_progress" and batch.request_counts.processing == 2
    assert batch.id in [one.id for one in client.messages.batches.list(limit=1)]
    while (batch := client.messages.batches.retrieve(batch.id)).processing_status != "ended":
        time.sleep(0.2)
    results = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
    whole = client.messages.create(messages=user(QUESTION), **GREEDY)
    assert results["one"].message.content[0].text == whole.content[0].text
    assert results["two"].error.error.type == "not_found_error"
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 1)
    assert client.messages.batches.delete(batch.id).id == batch.id
    error_of(anthropic.NotFoundError, lambda: client.messages.batches.retrieve(batch.id))


@check
def message_batch_is_cancelled() -> None:
    params = {"model": MODEL, "max_tokens": LONG_STORY_TOKENS, "messages": user(STORY)}
    batch = client.messages.batches.create(requests=[{"custom_id": "one", "params": params}])
    error_of(anthropic.ConflictError, lambda: client.messages.batches.delete(batch.id))
    assert client.messages.batches.cancel(batch.id).processing_status == "canceling"
    while (batch := client.messages.batches.retrieve(batch.id)).processing_status != "ended":
        time.sleep(0.2)
    assert [one.result.type for one in client.messages.batches.results(batch.id)] == ["canceled"]
    wrong = [{"custom_id": "a b", "params": params}]
    assert "custom_id" in str(
        error_of(anthropic.BadRequestError, lambda: client.messages.batches.create(requests=wrong))
    )


@check
def errors_are_those_of_the_client() -> None:
    def refusal(kind: type[Exception], **wrong: Any) -> Any:
        return error_of(kind, lambda: client.messages.create(**{"messages": user("x"), **GREEDY, **wrong}))

    assert refusal(anthropic.NotFoundError, model="absent").request_id
    assert "max_tokens" in str(refusal(anthropic.BadRequestError, max_tokens=-1))
    assert "prompt is too long" in str(refusal(anthropic.BadRequestError, messages=user(TOO_LONG)))


@check
def closed_stream_cancels_its_job() -> None:
    with client.messages.stream(messages=user(STORY), **{**GREEDY, "max_tokens": LONG_STORY_TOKENS}) as stream:
        next(iter(stream.text_stream))
    wait_until_newest_job_is_cancelled()


if __name__ == "__main__":
    main("anthropic")
