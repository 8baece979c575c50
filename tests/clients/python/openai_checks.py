"""The official `openai` package: chat, completions, responses, models, files, batches and webhooks."""

from __future__ import annotations

import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
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
    user,
    wait_until_newest_job_is_cancelled,
)
from clients.python.river import ASK_LENGTH, ASK_RIVER, LENGTH_TOOL, River, length_of

client: Any = openai.OpenAI(base_url=API, api_key=KEY, max_retries=0, timeout=120)
CHAT = "/v1/chat/completions"
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24}


@check
def served_model_is_listed_and_retrieved() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def chat_answers_with_text_and_usage() -> None:
    answer = client.chat.completions.create(messages=user(QUESTION), **GREEDY)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == GREEDY["max_tokens"]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@check
def streamed_chat_has_the_text_and_the_usage_of_the_whole_answer() -> None:
    whole = client.chat.completions.create(messages=user(QUESTION), **GREEDY)
    options = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": True}
    *pieces, last = client.chat.completions.create(
        messages=user(QUESTION), stream=True, stream_options=options, **GREEDY
    )
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert [piece.usage.completion_tokens for piece in pieces][-1] == whole.usage.completion_tokens


@check
async def asynchronous_client_streams() -> None:
    async with openai.AsyncOpenAI(base_url=API, api_key=KEY, max_retries=0) as asynchronous:
        api: Any = asynchronous
        stream = await api.chat.completions.create(messages=user(QUESTION), stream=True, **GREEDY)
        assert "".join([piece.choices[0].delta.content or "" async for piece in stream])


@check
def completions_answer_and_stream_the_same_text() -> None:
    asked = {"prompt": "Once upon a time", "logprobs": 2, **GREEDY}
    whole = client.completions.create(**asked).choices[0]
    pieces = client.completions.create(stream=True, **asked)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.text != ""
    assert len(whole.logprobs.tokens) == GREEDY["max_tokens"]


@check
def forced_call_is_answered_in_a_second_request() -> None:
    asked = {**GREEDY, "max_tokens": 200, "tools": [LENGTH_TOOL], "parallel_tool_calls": False}
    first = client.chat.completions.create(messages=user(ASK_LENGTH), tool_choice="required", **asked)
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert (first.choices[0].finish_reason, call.function.name) == ("tool_calls", "length_of")
    result = {"role": "tool", "tool_call_id": call.id, "content": length_of(**json.loads(call.function.arguments))}
    second = client.chat.completions.create(
        messages=[*user(ASK_LENGTH), message, result], tool_choice="none", **asked
    ).choices[0]
    assert second.message.content
    assert second.message.tool_calls is None


@check
def stream_helper_collects_a_call_with_its_parsed_arguments() -> None:
    tool = openai.pydantic_function_tool(River)
    choice = {"type": "function", "function": {"name": "River"}}
    asked = {**GREEDY, "max_tokens": 200, "tools": [tool], "tool_choice": choice}
    with client.chat.completions.stream(messages=user(ASK_RIVER), **asked) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert isinstance(call.function.parsed_arguments, River)


@check
def parsed_message_is_sent_back() -> None:
    asked = {**GREEDY, "max_tokens": 200, "response_format": River}
    message = client.chat.completions.parse(messages=user(ASK_RIVER), **asked).choices[0].message
    assert isinstance(message.parsed, River)
    again = [*user(ASK_RIVER), message, *user("Another one.")]
    assert isinstance(client.chat.completions.parse(messages=again, **asked).choices[0].message.parsed, River)


@check
def hints_and_neutral_values_are_accepted() -> None:
    neutral = {
        "chat_template_kwargs": {"enable_thinking": False},
        "use_beam_search": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "truncate_prompt_tokens": None,
        "length_penalty": 1.0,
        "skip_special_tokens": True,
        "priority": 1,
    }
    hints = {"reasoning_effort": "none", "verbosity": "low", "store": True, "service_tier": "flex", "user": "ann"}
    messages = [{**user(QUESTION)[0], "name": "ann"}]
    asked = {**GREEDY, "max_tokens": 16.0}
    answer = client.chat.completions.create(messages=messages, extra_body=neutral, **hints, **asked)
    assert answer.usage.completion_tokens == 16
    assert answer.service_tier == "flex"


@check
def conversations_are_counted_and_shortened() -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input=QUESTION, instructions="Be short.")
    answered = client.responses.create(model=MODEL, input=QUESTION, instructions="Be short.", max_output_tokens=1)
    assert answered.usage is not None and counted.input_tokens == answered.usage.input_tokens
    short = client.responses.compact(model=MODEL, input=QUESTION)
    user, summary = (item.model_dump(exclude_none=True, warnings=False) for item in short.output)
    assert user["content"][0]["text"] == QUESTION and summary["type"] == "compaction"
    more: Any = [user, summary, {"role": "user", "content": QUESTION}]
    assert client.responses.create(model=MODEL, input=more, max_output_tokens=4).output_text


@check
def responses_answer_with_text_and_usage() -> None:
    response = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=24)
    assert response.output_text
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 24


@check
def response_stream_numbers_its_events_and_can_be_read_again() -> None:
    asked = {"model": MODEL, "input": ASK_RIVER, "temperature": 0, "max_output_tokens": 200}
    with client.responses.stream(background=True, text_format=River, **asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    again = list(client.responses.retrieve(final.id, stream=True, starting_after=3))
    assert [event.sequence_number for event in again] == [*range(4, len(events))]
    assert client.responses.retrieve(final.id).output_text == final.output_text
    assert isinstance(final.output_parsed, River)


@check
def forced_call_of_a_response_is_answered_in_the_next_one() -> None:
    function = {"type": "function", **LENGTH_TOOL["function"], "strict": True}  # type: ignore[dict-item]
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 200, "tools": [function]}
    asked["parallel_tool_calls"] = False
    first = client.responses.create(input=ASK_LENGTH, tool_choice="required", **asked)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id}
    result["output"] = length_of(**json.loads(call.arguments))
    second = client.responses.create(input=[result], previous_response_id=first.id, tool_choice="none", **asked)
    assert second.output_text
    items = client.responses.input_items.list(second.id).data
    assert "function_call_output" in [item.type for item in items]


@check
def parsed_response_has_its_record() -> None:
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 200}
    assert isinstance(client.responses.parse(input=ASK_RIVER, text_format=River, **asked).output_parsed, River)


@check
def background_response_is_canceled_and_deleted() -> None:
    response = client.responses.create(
        model=MODEL, input=STORY, background=True, max_output_tokens=LONG_STORY_TOKENS, temperature=0
    )
    assert response.status in ("queued", "in_progress")
    assert client.responses.cancel(response.id).id == response.id
    wait_until_newest_job_is_cancelled()
    assert client.responses.retrieve(response.id).status == "cancelled"
    client.responses.delete(response.id)
    error_of(openai.NotFoundError, lambda: client.responses.retrieve(response.id))


@check
def errors_are_those_of_the_client() -> None:
    def refusal(kind: type[Exception], **wrong: Any) -> Any:
        return error_of(kind, lambda: client.chat.completions.create(**{"messages": user("x"), **GREEDY, **wrong}))

    assert refusal(openai.NotFoundError, model="absent").code == "model_not_found"
    assert refusal(openai.BadRequestError, top_p=9).param == "top_p"
    assert "max_tokens" in refusal(openai.BadRequestError, extra_body={"max_token": 3}).message
    too_long = refusal(openai.BadRequestError, messages=user(TOO_LONG))
    assert (too_long.code, bool(too_long.request_id)) == ("context_length_exceeded", True)


@check
def request_id_of_the_caller_is_kept() -> None:
    headers = {"X-Request-Id": "mine-1"}
    raw = client.chat.completions.with_raw_response.create(messages=user("x"), extra_headers=headers, **GREEDY)
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse().choices


@check
def closed_stream_cancels_its_job() -> None:
    asked = {**GREEDY, "max_tokens": LONG_STORY_TOKENS, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(messages=user(STORY), stream=True, **asked) as stream:
        next(iter(stream))
    wait_until_newest_job_is_cancelled()


def uploaded(*rows: Any) -> Any:
    lines = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    return client.files.create(file=("rows.jsonl", lines.encode()), purpose="batch")


def row(custom_id: str, **body: Any) -> dict[str, Any]:
    asked = {"messages": user(QUESTION), **GREEDY, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked}


def made(*rows: Any) -> Any:
    return client.batches.create(input_file_id=uploaded(*rows).id, endpoint=CHAT, completion_window="24h")


def ended(batch: Any) -> Any:
    while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
    return batch


def lines_of(file_id: str) -> list[Any]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


@check
def file_is_uploaded_listed_read_and_deleted() -> None:
    file = uploaded("{}", "{}")
    assert (file.bytes, file.filename, file.purpose) == (5, "rows.jsonl", "batch")
    assert file.id in [one.id for one in client.files.list(limit=1)]
    assert client.files.content(file.id).text == "{}\n{}"
    assert client.files.delete(file.id).deleted
    error_of(openai.NotFoundError, lambda: client.files.retrieve(file.id))


@check
def batch_has_the_answers_of_chats_and_errors_in_a_file_of_their_own() -> None:
    batch = made(row("one"), row("two", temperature=-1))
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    batch = ended(batch)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    (answered,), (failed,) = lines_of(batch.output_file_id), lines_of(batch.error_file_id)
    whole = client.chat.completions.create(messages=user(QUESTION), **GREEDY)
    assert answered["response"]["body"]["choices"][0]["message"]["content"] == whole.choices[0].message.content
    assert (failed["custom_id"], failed["error"]["param"]) == ("two", "temperature")


@check
def batch_is_cancelled_and_reads_its_file_until_then() -> None:
    batch = made(row("one", max_tokens=LONG_STORY_TOKENS, ignore_eos=True, messages=user(STORY)))
    error_of(openai.ConflictError, lambda: client.files.delete(batch.input_file_id))
    while client.batches.retrieve(batch.id).status == "validating":
        time.sleep(0.1)  # Its rows are not known before.
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(batch)
    assert batch.status == "cancelled"
    assert lines_of(batch.error_file_id)[0]["error"]["code"] == "batch_cancelled"


@check
def wrong_lines_of_a_batch_are_named() -> None:
    (problem,) = ended(made(row("one"), "", row("one"))).errors.data
    assert (problem.code, problem.line) == ("duplicate_custom_id", 3)


@check
def end_of_a_batch_is_told_to_a_webhook_whose_signature_the_client_checks() -> None:
    received: queue.Queue[tuple[bytes, dict[str, str]]] = queue.Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.put((self.rfile.read(int(self.headers["content-length"])), dict(self.headers)))
            self.send_response(204)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/hook"
        endpoint = client.webhooks.create(url=url, name="checks", event_types=["batch.completed"])
        batch = made(row("one"))
        body, headers = received.get(timeout=60)
        event = client.webhooks.unwrap(body, headers, secret=endpoint.signing_secret)
        assert (event.type, event.data.id) == ("batch.completed", batch.id)
        wrong = body + b" "
        error_of(
            openai.InvalidWebhookSignatureError,
            lambda: client.webhooks.unwrap(wrong, headers, secret=endpoint.signing_secret),
        )
        client.webhooks.delete(endpoint.id)
        server.shutdown()


if __name__ == "__main__":
    main("openai")
