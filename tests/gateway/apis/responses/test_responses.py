"""The Responses API through the official client. The node echoes each conversation's last message as its answer."""

from __future__ import annotations

import time
from itertools import groupby
from typing import Any

import httpx
import openai
import pytest
import redis
from fakes.waiting import wait_until
from pydantic import BaseModel

from penstock.contract.errors import UnavailableError
from penstock.contract.job import MAX_METADATA
from penstock.contract.sampling import StructuredOutputs
from penstock.gateway.apis.responses.create import MAX_CHAIN
from penstock.queue import keys
from penstock.queue.broker.producer import ProducerBroker

MODEL = "acme/echo"


class River(BaseModel):
    name: str
    length_km: int


RIVER = '{"name": "Oder", "length_km": 840}'


def ended(api: Any, response_id: str) -> Any:
    """Poll a background response until it has ended. Return it."""
    return wait_until(
        lambda: api.responses.retrieve(response_id), lambda one: one.status not in ("queued", "in_progress")
    )


def begun(api: Any, response_id: str) -> Any:
    """Return a stream's first events, up to its first text."""
    events = []
    with api.responses.retrieve(response_id, stream=True) as stream:
        for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                return events
    raise AssertionError([event.type for event in events])


def forget_log(redis_url: str, response_id: str) -> None:
    """Delete the log, as its expiry does two minutes after the end."""
    with redis.Redis.from_url(redis_url) as queue:
        assert queue.delete(keys.log(response_id.removeprefix("resp_"))) == 1


def test_a_text_gives_a_response_with_one_message(api: Any) -> None:
    response = api.responses.create(model=MODEL, input="hello", metadata={"a": "b"}, user="me", temperature=0.5)
    assert (response.object, response.status, response.output_text) == ("response", "completed", "hello")
    assert (response.model, response.metadata, response.user, response.temperature) == (MODEL, {"a": "b"}, "me", 0.5)
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (5, 5, 10)
    assert response.error is response.incomplete_details is None
    assert response.completed_at >= response.created_at > time.time() - 60


def test_a_response_that_reaches_its_limit_is_incomplete(api: Any) -> None:
    response = api.responses.create(model=MODEL, input="abcdef", max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status) == ("abc", "incomplete")
    *_, last = api.responses.create(model=MODEL, input="abcdef", max_output_tokens=3, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", "abc")


@pytest.mark.parametrize("background", [False, True])
def test_a_stream_has_typed_events_with_consecutive_numbers(api: Any, background: bool) -> None:
    events = list(api.responses.create(model=MODEL, input="né", stream=True, background=background))
    begins = ["response.created", *(["response.queued"] if background else []), "response.in_progress"]
    # Tokens that arrive together are one delta.
    assert [kind for kind, _ in groupby(event.type for event in events)] == [
        *begins,
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == events[-4].text == "né"
    assert events[-1].response == api.responses.retrieve(events[0].response.id)


def test_the_clients_own_stream_helper_puts_a_response_together(api: Any) -> None:
    with api.responses.stream(model=MODEL, input=RIVER, text_format=River) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == River(name="Oder", length_km=840)


def test_the_clients_own_parsing_gets_the_model_that_it_asked_for(api: Any, engine: Any) -> None:
    response = api.responses.parse(model=MODEL, input=RIVER, text_format=River)
    assert response.output_parsed == River(name="Oder", length_km=840)
    assert engine.last_params.structured_outputs == StructuredOutputs(
        json=River.model_json_schema() | {"additionalProperties": False}
    )
    assert response.text.format.type == "json_schema"


def test_input_may_be_items_with_parts_and_unknown_members(api: Any, engine: Any) -> None:
    first = api.responses.create(model=MODEL, input="hi")
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a", "cache_control": {}}]},
        *(item.model_dump() for item in first.output),
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "", "status": "completed", "x": 1},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}]},
    ]
    response = api.responses.create(model=MODEL, input=items, instructions="be kind")
    assert response.output_text == "done"
    assert response.instructions == "be kind"
    messages = engine.tokenizer.last_chat[0]
    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "be kind"),
        ("developer", "be brief"),
        ("user", "a"),
        ("assistant", "hi"),
        ("tool", "done"),
    ]
    assert [*messages[3]["tool_calls"]] == [{"id": "c1", "name": "f", "arguments": "{}"}]


def test_input_items_are_listed_in_pages(api: Any) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    response = api.responses.create(model=MODEL, input=items)
    pages = api.responses.input_items.list(response.id, limit=2, order="asc")
    assert [item.content[0].text for item in pages] == list("01234")
    assert [item.content[0].text for item in api.responses.input_items.list(response.id)] == list("43210")
    assert len(pages.data) == 2 and pages.has_more
    with pytest.raises(openai.BadRequestError):
        api.responses.input_items.list(response.id, after="nothing")
    with pytest.raises(openai.BadRequestError):
        api.responses.input_items.list(response.id, limit=101)


def test_a_background_response_is_answered_at_once_and_ends_later(api: Any, engine: Any) -> None:
    engine.may_go_on.clear()
    response = api.responses.create(model=MODEL, input="x" * 30, background=True)
    # The node may have begun by the time the answer is written.
    assert response.status in ("queued", "in_progress")
    assert (response.output, response.usage) == ([], None)
    engine.may_go_on.set()
    assert ended(api, response.id).output_text == "x" * 30


@pytest.mark.parametrize("options", [{}, {"background": True}])
def test_a_stream_goes_on_after_any_event(api: Any, options: dict[str, Any]) -> None:
    events = [e.model_dump() for e in api.responses.create(model=MODEL, input="abc", stream=True, **options)]
    response_id = events[0]["response"]["id"]
    for number in range(len(events)):
        rest = api.responses.retrieve(response_id, stream=True, starting_after=number)
        assert [event.model_dump() for event in rest] == events[number + 1 :]


def test_events_and_response_stay_the_same_without_the_jobs_log(api: Any, redis_url: str) -> None:
    response_id = api.responses.create(model=MODEL, input="né" * 20).id
    events, whole = list(api.responses.retrieve(response_id, stream=True)), api.responses.retrieve(response_id)
    forget_log(redis_url, response_id)
    assert list(api.responses.retrieve(response_id, stream=True)) == events
    assert api.responses.retrieve(response_id) == whole


def test_a_canceled_response_keeps_what_it_has(api: Any, engine: Any, redis_url: str) -> None:
    engine.step_s = 0.02
    response_id = api.responses.create(model=MODEL, input="x" * 200, background=True).id
    begun(api, response_id)
    response = api.responses.cancel(response_id)
    assert (response.status, response.usage, response.error) == ("cancelled", None, None)
    assert 0 < len(response.output_text) < 200
    assert api.responses.cancel(response_id) == api.responses.retrieve(response_id) == response
    events = list(api.responses.retrieve(response_id, stream=True))
    assert (events[-1].type, events[-1].response) == ("response.incomplete", response)
    forget_log(redis_url, response_id)
    assert list(api.responses.retrieve(response_id, stream=True)) == events
    assert api.responses.retrieve(response_id) == response


def test_cancellation_is_answered_although_redis_left_behind_it(
    api: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise UnavailableError("Redis is unreachable", code="redis_away")

    engine.step_s = 0.02
    response_id = api.responses.create(model=MODEL, input="x" * 200, background=True).id
    begun(api, response_id)
    with monkeypatch.context() as patched:
        patched.setattr(ProducerBroker, "detach", fail)
        assert api.responses.retrieve(response_id).status == "in_progress"
        assert api.with_options(max_retries=0).responses.cancel(response_id).status == "cancelled"


def test_only_background_responses_can_be_canceled(api: Any) -> None:
    response = api.responses.create(model=MODEL, input="a")
    with pytest.raises(openai.BadRequestError, match="background"):
        api.responses.cancel(response.id)
    done = ended(api, api.responses.create(model=MODEL, input="a", background=True).id)
    assert api.responses.cancel(done.id) == done


def test_a_deleted_response_is_gone_with_its_output(api: Any, redis_url: str) -> None:
    response_id = api.responses.create(model=MODEL, input="abc").id
    api.responses.delete(response_id)
    job_id = response_id.removeprefix("resp_")
    with redis.Redis.from_url(redis_url) as queue:
        assert not queue.exists(keys.response(job_id), keys.result(job_id), keys.log(job_id))
    for call in (api.responses.retrieve, api.responses.delete, api.responses.cancel, api.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            call(response_id)
        assert caught.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        api.responses.create(model=MODEL, input="b", previous_response_id=response_id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_deleting_an_open_response_cancels_its_job(api: Any, engine: Any, stack: Any) -> None:
    engine.step_s = 0.02
    response_id = api.responses.create(model=MODEL, input="x" * 200, background=True).id
    begun(api, response_id)
    api.responses.delete(response_id)

    async def state() -> str:
        async with stack.client() as client:
            return str((await client.status(response_id.removeprefix("resp_"))).state)

    wait_until(lambda: stack.call(state()) == "cancelled")


def test_a_response_that_is_not_stored_cannot_be_retrieved(api: Any, redis_url: str) -> None:
    response = api.responses.create(model=MODEL, input="abc", store=False)
    assert (response.output_text, response.store) == ("abc", False)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match="store"):
        api.responses.create(model=MODEL, input="abc", store=False, background=True)


def test_a_previous_response_brings_its_conversation_but_not_its_instructions(api: Any, engine: Any) -> None:
    first = api.responses.create(model=MODEL, input="one", instructions="first")
    second = api.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    third = api.responses.create(model=MODEL, input="three", previous_response_id=second.id, instructions="third")
    assert (third.output_text, third.previous_response_id) == ("three", second.id)
    assert [(m["role"], m["content"]) for m in engine.tokenizer.last_chat[0]] == [
        ("system", "third"),
        *(("user", "one"), ("assistant", "one"), ("user", "two"), ("assistant", "two"), ("user", "three")),
    ]
    assert [item.content[0].text for item in api.responses.input_items.list(third.id)] == ["three"]


def test_an_open_or_canceled_response_has_no_successor(api: Any, engine: Any) -> None:
    engine.step_s = 0.02
    response_id = api.responses.create(model=MODEL, input="x" * 200, background=True).id
    for _ in range(2):
        with pytest.raises(openai.BadRequestError) as caught:
            api.responses.create(model=MODEL, input="b", previous_response_id=response_id)
        assert caught.value.code == "previous_response_not_completed"
        api.responses.cancel(response_id)


def test_items_of_stored_responses_can_be_named(api: Any, engine: Any) -> None:
    first, second = (api.responses.create(model=MODEL, input=text) for text in ("one", "two"))
    items = [
        {"role": "user", "content": "begin"},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "middle"},
        {"type": "item_reference", "id": second.output[0].id},
        {"role": "user", "content": "end"},
    ]
    response = api.responses.create(model=MODEL, input=items)
    said = ["begin", "one", "middle", "two", "end"]
    assert [message["content"] for message in engine.tokenizer.last_chat[0]] == said
    # The successor of a response with references has what they stood for.
    api.responses.create(model=MODEL, input="after", previous_response_id=response.id)
    assert [message["content"] for message in engine.tokenizer.last_chat[0]] == [*said, "end", "after"]
    for wrong in ("msg_9_" + first.id.removeprefix("resp_"), "msg_1"):
        with pytest.raises(openai.BadRequestError) as caught:
            api.responses.create(model=MODEL, input=[{"type": "item_reference", "id": wrong}])
        assert caught.value.code == "item_not_found"


def test_a_conversation_has_limits(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    response_id = api.responses.create(model=MODEL, input="a").id
    monkeypatch.setattr("penstock.gateway.apis.responses.create.MAX_CHAIN", 3)
    for _ in range(3):
        response_id = api.responses.create(model=MODEL, input="a", previous_response_id=response_id).id
    with pytest.raises(openai.BadRequestError, match="chain has more than 3 responses"):
        api.responses.create(model=MODEL, input="a", previous_response_id=response_id)
    monkeypatch.setattr("penstock.gateway.apis.responses.create.MAX_CHAIN", MAX_CHAIN)
    monkeypatch.setattr("penstock.gateway.apis.responses.create.MAX_MESSAGES", 8)
    with pytest.raises(openai.BadRequestError, match="more than 8 messages") as caught:
        api.responses.create(model=MODEL, input="a", previous_response_id=response_id)
    assert caught.value.code == "conversation_too_large"


def test_what_a_conversation_reads_of_its_earlier_responses_is_limited(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "r" * 2000}]}
    message = {"type": "message", "role": "user", "content": "a"}
    monkeypatch.setattr("penstock.gateway.apis.responses.create.MAX_STORED_BYTES", 8000)
    response_id = None
    for _ in range(3):
        response_id = api.responses.create(model=MODEL, input=[reasoning, message], previous_response_id=response_id).id
    with pytest.raises(openai.BadRequestError, match="more than 8000 bytes") as caught:
        api.responses.create(model=MODEL, input="a", previous_response_id=response_id)
    assert caught.value.code == "conversation_too_large"


def test_an_input_too_large_to_be_stored_is_refused(api: Any) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        api.responses.create(model=MODEL, input="a" * ((8 << 20) - 60))
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
    with pytest.raises(openai.BadRequestError) as too_long:
        api.responses.create(model=MODEL, input="a" * (7 << 20))
    assert too_long.value.code == "context_length_exceeded"


def test_logprobs_come_with_deltas_and_with_the_whole_text(api: Any, engine: Any) -> None:
    asked = {"model": MODEL, "input": "abc", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    events = list(api.responses.create(**asked, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == ["a", "b", "c"]
    whole = api.responses.create(**asked)
    rows = whole.output[0].content[0].logprobs
    assert [(row.token, len(row.top_logprobs)) for row in rows] == [("a", 2), ("b", 2), ("c", 2)]
    assert [row.token for row in events[-1].response.output[0].content[0].logprobs] == ["a", "b", "c"]


def test_an_idempotency_key_gives_the_same_response_again(api: Any) -> None:
    key = {"Idempotency-Key": f"key-{time.time_ns()}"}
    first = api.responses.create(model=MODEL, input="abc", extra_headers=key, metadata={"n": "1"})
    again = api.responses.create(model=MODEL, input="abc", extra_headers=key, metadata={"n": "2"})
    assert again == first
    in_background = {"Idempotency-Key": f"key-{time.time_ns()}"}
    asked = {"model": MODEL, "input": "abc", "background": True, "extra_headers": in_background}
    ids = {api.responses.create(**asked).id for _ in range(2)}
    assert len(ids) == 1


REFUSED = [
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, "input_image"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input_file"),
    ({"input": [{"type": "computer_call", "id": "w"}]}, "computer_call"),
    ({"input": []}, "input"),
    ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "file_search"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "file_search"}]}]}, "file_search"),
    ({"tool_choice": {"type": "file_search"}}, "file_search"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"metadata": {str(n): "x" for n in range(MAX_METADATA + 1)}}, "metadata"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 11}, "temperature"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"extra_body": {"nonsense": 1}}, "nonsense"),
    ({"previous_response_id": "resp_nothing"}, "previous_response_id"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
    ({"extra_query": {"after": "x:1:2"}}, "after"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_is_not_supported_is_refused_by_name(api: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(**{"model": MODEL, "input": "a", **options})
    assert said in f"{caught.value.param} {caught.value.message}"
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_job_is_an_http_error_unless_it_runs_in_the_background(api: Any, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(model=MODEL, input="a" * 300, stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    made = api.responses.create(model=MODEL, input="a" * 300, stream=stream, background=True)
    response = list(made)[-1].response if stream else ended(api, made.id)
    assert (response.status, response.error.code, response.output) == ("failed", "context_length_exceeded", [])


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses/resp_nothing",
        "/v1/responses/nothing",
        "/v1/responses/resp_echo.01a2019f-0232-763c-9479-24ddbb01a4ad",
    ],
)
def test_an_unknown_response_is_not_found(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")


@pytest.mark.parametrize("query", ["starting_after=1", "stream=yes", "stream=true&starting_after=x", "nonsense=1"])
def test_a_wrong_query_is_refused(api: Any, http: httpx.Client, query: str) -> None:
    response = api.responses.create(model=MODEL, input="a")
    assert http.get(f"/v1/responses/{response.id}?{query}").status_code == 400


@pytest.mark.parametrize("how", ["whole", "stream", "background"])
def test_a_response_ends_at_its_deadline(api: Any, engine: Any, how: str) -> None:
    assert api.responses.create(model=MODEL, input="hi", extra_body={"deadline_s": 30}).output_text == "hi"
    engine.step_s = 0.05
    late: dict[str, Any] = {"model": MODEL, "input": "a" * 200, "extra_body": {"deadline_s": 0.3}}
    if how == "whole":
        with pytest.raises(openai.APIStatusError) as caught:
            api.responses.create(**late)
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        return
    if how == "stream":
        *_, last = api.responses.create(**late, stream=True)
        assert last.type == "response.failed"
        response = last.response
    else:
        response = ended(api, api.responses.create(**late, background=True).id)
    assert (response.status, response.error.code) == ("failed", "deadline_exceeded")


@pytest.mark.parametrize("deadline_s", [0, -1, 31_622_401, "5"])
def test_a_wrong_deadline_of_a_response_is_named(api: Any, deadline_s: object) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(model=MODEL, input="hi", extra_body={"deadline_s": deadline_s})
    assert caught.value.param == "deadline_s"
