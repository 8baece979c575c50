"""Fields beside the prompt that clients and load tools send: each has its effect, or is refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from fakes.waiting import wait_until

from penstock.contract.job import SamplingParams
from tests.gateway.conftest import EchoEngine, Stack

MODEL = "acme/echo"
JOB = "x-penstock-job"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def text_body(prompt: Any = "hello", **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 250, **options}


def chat_body(content: Any = "hello", **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **options}


def body_of(path: str, **options: Any) -> dict[str, Any]:
    return chat_body(**options) if path == CHAT else text_body(**options)


def pieces_of(raw: str) -> list[dict[str, Any]]:
    """Read a stream as load tools do: every event is one line of data, and the last one is [DONE]."""
    assert raw.endswith("\n\n")
    *blocks, last = raw.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def read_in_pieces(http: httpx.Client, engine: EchoEngine, path: str, body: dict[str, Any]) -> str:
    """Read a stream whose tokens do not come all at once, however busy this machine is.

    The engine waits until the first token of each choice has been read.
    """
    engine.may_go_on.clear()
    raw, begun = "", set()
    with http.stream("POST", path, json=body) as answer:
        for line in answer.iter_lines():
            raw += f"{line}\n"
            choices = json.loads(line.removeprefix("data: "))["choices"] if line.startswith("data: {") else []
            begun |= {
                choice["index"] for choice in choices if choice.get("text") or choice.get("delta", {}).get("content")
            }
            if len(begun) == body.get("n", 1):
                engine.may_go_on.set()
    return raw


def timeless(raw: str) -> str:
    """Return a stream without its `created` time."""
    return re.sub(r'"created":\d+,', "", raw)


# Events ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("options", [{}, {"n": 2}, {"stream_options": {"include_usage": True}}])
def test_an_event_is_one_line_unless_ids_are_asked_for(http: httpx.Client, path: str, options: dict[str, Any]) -> None:
    response = http.post(path, json=body_of(path, stream=True, **options))
    assert pieces_of(response.text)
    assert response.headers[JOB].startswith("echo.")


@pytest.mark.parametrize(
    ("headers", "options", "has_ids"),
    [
        ({}, {"include_event_ids": True}, True),
        ({"X-Penstock-Event-Ids": "true"}, {}, True),
        ({"Idempotency-Key": "ids-by-key"}, {}, True),
        ({"X-Penstock-Event-Ids": "false", "Idempotency-Key": "no-ids-by-header"}, {}, False),
        ({"X-Penstock-Event-Ids": "true"}, {"include_event_ids": False}, False),
    ],
)
def test_event_ids_are_asked_for_by_option_header_or_key(
    http: httpx.Client, headers: dict[str, str], options: dict[str, Any], has_ids: bool
) -> None:
    response = http.post(TEXT, json=text_body(stream=True, stream_options=options), headers=headers)
    assert response.text.startswith(f"id: {response.headers[JOB]}:0:") is has_ids


def test_a_resumed_stream_has_event_ids(http: httpx.Client) -> None:
    first = http.post(TEXT, json=text_body(stream=True), headers={"X-Penstock-Event-Ids": "true"})
    place = first.text.split("\n")[0].removeprefix("id: ")
    rest = http.post(TEXT, json=text_body(stream=True), params={"after": place}).text
    assert timeless(rest) == timeless(first.text.split("\n\n", 1)[1])


def test_invalid_value_of_the_event_ids_header_is_refused(http: httpx.Client) -> None:
    response = http.post(TEXT, json=text_body(stream=True), headers={"X-Penstock-Event-Ids": "maybe"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-penstock-event-ids")


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("options", [{}, {"logprobs": True}, {"n": 2}])
@pytest.mark.parametrize("include_usage", [False, True])
def test_each_event_has_the_usage_so_far_on_request(
    http: httpx.Client, engine: EchoEngine, path: str, options: dict[str, Any], include_usage: bool
) -> None:
    if path == TEXT and "logprobs" in options:
        options = {"logprobs": 1}
    asked = {"continuous_usage_stats": True, "include_usage": include_usage}
    body = body_of(path, stream=True, stream_options=asked, **options)
    pieces = pieces_of(read_in_pieces(http, engine, path, body))
    last = pieces.pop() if include_usage else None
    for number in range(options.get("n", 1)):
        usages = [piece["usage"] for piece in pieces if piece["choices"][0]["index"] == number]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(set(counts)) and counts[-1] == 5 and len(counts) > 1
        assert all(usage["prompt_tokens"] == 5 for usage in usages)
        assert all(usage["total_tokens"] == 5 + usage["completion_tokens"] for usage in usages)
    assert last is None or (last["choices"], last["usage"]["completion_tokens"]) == ([], 5 * options.get("n", 1))


def test_a_resumed_stream_has_the_same_usage_in_each_event(http: httpx.Client, engine: EchoEngine) -> None:
    engine.step_s = 0.01
    options = {"continuous_usage_stats": True, "include_event_ids": True}
    body = text_body(stream=True, stream_options=options)
    whole = http.post(TEXT, json=body).text
    place = whole.split("\n")[0].removeprefix("id: ")
    assert timeless(http.post(TEXT, json=body, params={"after": place}).text) == timeless(whole.split("\n\n", 1)[1])


# Tokens ---------------------------------------------------------------------------------------------


def test_token_ids_of_chats_come_in_vllms_shape(http: httpx.Client, engine: EchoEngine) -> None:
    whole = http.post(CHAT, json=chat_body("héllo", return_token_ids=True)).json()
    assert whole["prompt_token_ids"] == list("héllo".encode())
    assert [choice["token_ids"] for choice in whole["choices"]] == [list("héllo".encode())]
    assert "prompt_logprobs" not in whole["choices"][0]
    engine.step_s = 0.005
    first, *others = pieces_of(http.post(CHAT, json=chat_body("héllo", return_token_ids=True, stream=True, n=2)).text)
    assert first["prompt_token_ids"] == list("héllo".encode())
    assert all("prompt_token_ids" not in piece for piece in others)
    for number in (0, 1):
        choices = [p["choices"][0] for p in (first, *others) if p["choices"][0]["index"] == number]
        assert [one for choice in choices for one in choice["token_ids"]] == list("héllo".encode())


def test_token_ids_of_completions_are_in_each_choice(http: httpx.Client, engine: EchoEngine) -> None:
    asked = text_body(["ab", "x" * 200], return_token_ids=True, n=2)
    whole = http.post(TEXT, json=asked).json()["choices"]
    expected = [list(b"ab")] * 2 + [[120] * 200] * 2
    assert [choice["prompt_token_ids"] for choice in whole] == expected
    assert [choice["token_ids"] for choice in whole] == expected
    said: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    for piece in pieces_of(http.post(TEXT, json=asked | {"stream": True}).text):
        (choice,) = piece["choices"]
        said.setdefault(choice["index"], []).extend(choice["token_ids"])
        prompts.setdefault(choice["index"], []).extend(choice.get("prompt_token_ids", ()))
    assert [said[number] for number in range(4)] == [prompts[number] for number in range(4)] == expected


def test_token_ids_and_log_probabilities_of_a_prompt_come_together(http: httpx.Client) -> None:
    asked = text_body("abc", return_token_ids=True, prompt_logprobs=1, stream=True)
    pieces = [piece["choices"][0] for piece in pieces_of(http.post(TEXT, json=asked).text)]
    assert len(pieces[0]["prompt_logprobs"]) == 3 and "token_ids" not in pieces[0]
    assert pieces[1]["prompt_token_ids"] == list(b"abc")


def test_interrupted_stream_with_token_ids_resumes(http: httpx.Client, engine: EchoEngine) -> None:
    engine.step_s = 0.01
    body = text_body(stream=True, return_token_ids=True, stream_options={"include_event_ids": True})
    blocks = timeless(http.post(TEXT, json=body).text).split("\n\n")
    for at, block in enumerate(blocks[:-3]):
        place = block.split("\n")[0].removeprefix("id: ")
        rest = timeless(http.post(TEXT, json=body, params={"after": place}).text).split("\n\n")
        assert rest == blocks[at + 1 :]


def test_the_ids_of_too_many_prompt_tokens_are_refused(stack: Stack, shared_engine: EchoEngine) -> None:
    url = stack.start_gateway(max_logprobs=9)
    refused = httpx.post(url + TEXT, json=text_body("x" * 100, return_token_ids=True), timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_token_ids")
    assert httpx.post(url + TEXT, json=text_body("x" * 9, return_token_ids=True), timeout=60).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_last_tokens_of_a_prompt_are_kept(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json=body_of(path, truncate_prompt_tokens=3)).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == "llo"
    assert answer["usage"]["prompt_tokens"] == 3


def test_a_prompt_over_the_context_fits_if_it_is_truncated(http: httpx.Client) -> None:
    assert http.post(TEXT, json=text_body("x" * 300)).status_code == 400
    assert http.post(TEXT, json=text_body("x" * 300, truncate_prompt_tokens=20)).status_code == 200
    ids = text_body([120] * 300, truncate_prompt_tokens=20)
    assert http.post(TEXT, json=ids).json()["usage"]["prompt_tokens"] == 20


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_refused_in_the_words_that_clients_look_for(
    http: httpx.Client, path: str, stream: bool
) -> None:
    body = chat_body("x" * 300, stream=stream) if path == CHAT else text_body([1] * 300, stream=stream)
    error = http.post(path, json=body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length" in error["message"]


# Chat templates -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({}, None),
        ({"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}}, None),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False, "x": [1]}},
            {"reasoning_effort": "low", "enable_thinking": True, "thinking": False, "x": [1]},
        ),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({"continue_final_message": True, "add_generation_prompt": False}, {"continue_final_message": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ],
)
def test_variables_reach_the_chat_template(
    http: httpx.Client, engine: EchoEngine, options: dict[str, Any], variables: dict[str, Any] | None
) -> None:
    assert http.post(CHAT, json=chat_body(**options)).status_code == 200
    given = engine.tokenizer.last_template_kwargs
    assert (None if given is None else json.loads(given)) == variables


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"a{i}": 1 for i in range(65)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * (1 << 14)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"continue_final_message": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
    ],
)
def test_variables_that_a_template_must_not_get_are_refused(
    http: httpx.Client, options: dict[str, Any], param: str
) -> None:
    response = http.post(CHAT, json=chat_body(**options))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


# Classes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generous_url(stack: Stack, shared_engine: EchoEngine) -> str:
    return str(stack.start_gateway(open_highest_class="interactive"))


def class_of(stack: Stack, response: httpx.Response) -> int:
    async def look() -> int:
        async with stack.client() as client:
            return int((await client.status(response.headers[JOB])).priority)

    return int(stack.call(look()))


@pytest.mark.parametrize(
    ("options", "expected", "tier"),
    [
        ({}, 1, None),
        ({"priority": 0}, 1, None),
        ({"priority": -5}, 0, None),
        ({"priority": 7.0}, 2, None),
        ({"priority": "batch"}, 2, None),
        ({"service_tier": "auto"}, 1, "default"),
        ({"service_tier": "default"}, 1, "default"),
        ({"service_tier": "flex"}, 2, "flex"),
        ({"service_tier": "priority"}, 0, "priority"),
        ({"service_tier": "flex", "priority": 1}, 2, "flex"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_priorities_and_service_tiers_are_classes(
    stack: Stack, generous_url: str, path: str, options: dict[str, Any], expected: int, tier: str | None
) -> None:
    response = httpx.post(generous_url + path, json=body_of(path, **options), timeout=60)
    assert response.json().get("service_tier") == tier
    assert class_of(stack, response) == expected
    streamed = httpx.post(generous_url + path, json=body_of(path, stream=True, **options), timeout=60)
    assert {piece.get("service_tier") for piece in pieces_of(streamed.text)} == {tier}


@pytest.mark.parametrize("options", [{"priority": -1}, {"service_tier": "priority"}])
def test_a_class_above_the_callers_is_refused_under_each_name(http: httpx.Client, options: dict[str, Any]) -> None:
    response = http.post(CHAT, json=chat_body(**options))
    assert (response.status_code, response.json()["error"]["code"]) == (403, "class_not_allowed")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"service_tier": "flex", "priority": "standard"}, "priority"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"priority": 0.5}, "priority"),
        ({"priority": [0]}, "priority"),
        ({"priority": True}, "priority"),
    ],
)
def test_classes_that_contradict_each_other_are_refused(
    http: httpx.Client, options: dict[str, Any], param: str
) -> None:
    response = http.post(CHAT, json=chat_body(**options))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("number", ["Infinity", "NaN", "1e999"])
@pytest.mark.parametrize("name", ["priority", "max_tokens"])
def test_values_that_are_no_numbers_are_refused(http: httpx.Client, name: str, number: str) -> None:
    raw = json.dumps(text_body(**{name: 12345})).replace("12345", number)
    response = http.post(TEXT, content=raw, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


# Values without effect, and unknown names -----------------------------------------------------------

HINTS = {
    "store": True,
    "verbosity": "low",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "user": "u",
    "metadata": {"a": "b"},
    "stream": True,
    "stream_options": {"include_obfuscation": True},
}
NEUTRAL: dict[str, Any] = {
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "allowed_token_ids": None,
    "return_tokens_as_token_ids": False,
    "include_reasoning": True,
    "documents": [],
    "echo": False,
    "add_special_tokens": False,
    "mm_processor_kwargs": {},
    "request_id": "r",
}


@pytest.mark.parametrize("options", [HINTS, NEUTRAL])
def test_values_that_change_nothing_are_accepted(
    http: httpx.Client, engine: EchoEngine, options: dict[str, Any]
) -> None:
    assert http.post(CHAT, json=chat_body(**options)).status_code == 200
    assert engine.last_params == SamplingParams()


@pytest.mark.parametrize("name", [name for name, value in NEUTRAL.items() if value not in (None, "r")])
def test_other_values_of_fields_without_an_effect_are_refused_by_name(http: httpx.Client, name: str) -> None:
    response = http.post(CHAT, json=chat_body(**{name: "something else"}))
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported_value")


def test_whole_numbers_may_be_written_with_a_point(http: httpx.Client, engine: EchoEngine) -> None:
    numbers = {"max_tokens": 16.0, "n": 1.0, "top_k": 5.0, "seed": 3.0, "min_tokens": 0.0, "stop_token_ids": [1.0]}
    assert http.post(CHAT, json=chat_body(**numbers)).status_code == 200
    assert engine.last_params == SamplingParams(max_tokens=16, top_k=5, seed=3, stop_token_ids=[1])
    for value in (16.5, "16", True, 1e300):
        assert http.post(CHAT, json=chat_body(max_tokens=value)).json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("max_token", "max_tokens"), ("temprature", "temperature"), ("topP", "top_p"), ("zzzzzzzz", None)],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(
    http: httpx.Client, name: str, nearest: str | None
) -> None:
    error = http.post(CHAT, json=chat_body(**{name: 1})).json()["error"]
    assert (error["param"], error["code"]) == (name, "unknown_field")
    shown = "" if nearest is None else f"; the most similar known name is {nearest}"
    remedy = "; a gateway with --unknown-fields ignore accepts it without effect"
    assert error["message"] == f"{name}: unknown field{shown}{remedy}"


@pytest.fixture(scope="module")
def lenient_url(stack: Stack, shared_engine: EchoEngine) -> str:
    return str(stack.start_gateway(unknown_fields="ignore"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 300_000])
def test_a_gateway_may_ignore_unknown_names_and_lists_them(lenient_url: str, stream: bool, num_bytes: int) -> None:
    """A large body is parsed in a process of its own."""
    unknown = {"top_a": 1, "über, all\r\n": [{}], "x" * 500: None}
    body = text_body("hi", stream=stream, user="u" * num_bytes, **unknown)
    response = httpx.post(lenient_url + TEXT, json=body, timeout=60)
    assert response.status_code == 200
    listed = response.headers["x-penstock-ignored-fields"].split(", ")
    assert listed == ["top_a", "%C3%BCber%2C%20all%0D%0A", "x" * 128]
    assert "x-penstock-ignored-fields" not in httpx.post(lenient_url + TEXT, json=text_body("hi"), timeout=60).headers


def test_a_list_of_ignored_names_is_bounded(lenient_url: str) -> None:
    body = text_body("hi", **{f"a{number}": 1 for number in range(500)})
    response = httpx.post(lenient_url + TEXT, json=body, timeout=60)
    assert len(response.headers["x-penstock-ignored-fields"].split(", ")) == 32


def test_header_of_ignored_names_is_short_enough_for_proxies(lenient_url: str) -> None:
    body = text_body("hi", **{chr(0x1F600 + number) * 128: 1 for number in range(32)})
    header = httpx.post(lenient_url + TEXT, json=body, timeout=60).headers["x-penstock-ignored-fields"]
    assert 1024 < len(header) <= 2048
    assert header.startswith("%F0%9F%98%80")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": -1, "bogus": 1}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"stream": True, "stream_options": {"bogus": 1}}, "stream_options.bogus"),
    ],
)
def test_known_names_are_checked_although_unknown_ones_are_ignored(
    lenient_url: str, options: dict[str, Any], param: str
) -> None:
    response = httpx.post(lenient_url + TEXT, json=text_body("hi", **options), timeout=60)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": "5"},
        {"temperature": "warm"},
        {"temperature": 50},
        {"n": 17},
        {"stop": 5},
        {"stop": ["x"] * 17},
        {"stream": 1},
        {"messages": {}},
        {"messages": [5]},
        {"messages": []},
        {"reasoning_effort": 5},
        {"response_format": 5},
        {"logit_bias": []},
        {"model": ""},
    ],
)
def test_refusals_are_in_the_gateways_own_words(http: httpx.Client, options: dict[str, Any]) -> None:
    message = http.post(CHAT, json=chat_body(**options)).json()["error"]["message"]
    name, _, said = message.partition(": ")
    assert name.partition("[")[0] == next(iter(options))
    assert said.startswith(("must be ", "must have ", "is not a valid value"))


# Request ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["req-1", "x" * 128])
def test_a_clients_request_id_is_that_of_the_log_and_the_answer(
    http: httpx.Client, given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "penstock.gateway.access"):
        for body in (text_body("hi"), text_body("hi", stream=True), text_body("hi", n=0)):
            assert http.post(TEXT, json=body, headers={"X-Request-Id": given}).headers["x-request-id"] == given
        # The line of a request is logged after its answer has arrived. That of an earlier test may be among them.
        num_logged = wait_until(lambda: _logged_ids(caplog).count(given), lambda number: number >= 3)
    assert num_logged == 3


def _logged_ids(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record)["request_id"] for record in caplog.records if record.name == "penstock.gateway.access"]


@pytest.mark.parametrize("given", ["", "x" * 129, "two words", "é"])
def test_a_request_id_that_a_log_cannot_hold_is_replaced(http: httpx.Client, given: Any) -> None:
    answer = http.post(TEXT, json=text_body("hi"), headers={"X-Request-Id": given.encode()})
    assert answer.status_code == 200
    assert len(answer.headers["x-request-id"]) == 32
