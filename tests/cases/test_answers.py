"""Answers that other servers gave wrong without a word, by public reports: a field has its effect or is refused."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import httpx
import pytest

USER = {"role": "user", "content": "Count from one to ten."}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Köln"]}}, "required": ["city"]}


@pytest.fixture(scope="module")
def door(demo_door: httpx.Client) -> httpx.Client:
    return demo_door


def ask(door: httpx.Client, path: str = CHAT, **fields: Any) -> Any:
    """Return a whole answer."""
    body = {"max_tokens": 12, "temperature": 0} | ({"messages": [USER]} if path == CHAT else {"prompt": "One, two,"})
    answered = door.post(path, json=body | fields)
    assert answered.status_code == 200, answered.text
    return answered.json()


def refusal(door: httpx.Client, path: str = CHAT, **fields: Any) -> Any:
    """Return the error of a body that is refused."""
    body = {"messages": [USER]} if path == CHAT else {"prompt": "One, two,"}
    answered = door.post(path, json={"max_tokens": 4} | body | fields)
    assert answered.status_code == 400, answered.text
    return answered.json()["error"]


def events(door: httpx.Client, path: str = CHAT, **fields: Any) -> list[Any]:
    """Return the events of a stream."""
    body = {"max_tokens": 12, "temperature": 0, "stream": True}
    body |= {"messages": [USER]} if path == CHAT else {"prompt": "One, two,"}
    with door.stream("POST", path, json=body | fields) as answered:
        assert answered.status_code == 200, answered.read()
        lines = [line.removeprefix("data: ") for line in answered.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(answer: Any) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def finite(value: Any) -> bool:
    """Return whether all numbers of a JSON value are finite."""
    numbers = [value] if isinstance(value, float) else []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(math.isfinite, numbers)) and all(finite(part) for part in parts)


# --- structured output that is not enforced


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "place"}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": r"^hello\q$"}, "name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/none"}, "name": "x"}},
        {"type": "grammar", "grammar": "root ::= 'x'"},
    ],
    ids=["schema beside its place", "no schema", "a pattern that is none", "a reference to nothing", "another type"],
)
def test_a_format_that_cannot_be_enforced_is_refused(door: httpx.Client, wanted: Any) -> None:
    """llama.cpp #10732, #18963 and #19051: 200 with any text."""
    error = refusal(door, response_format=wanted)
    assert error["param"].startswith("response_format")


@pytest.mark.parametrize("name", ["guided_grammer", "json_schemas", "format", "options", "keep_alive", "num_ctx"])
def test_a_field_of_another_server_or_with_a_typing_error_is_named(door: httpx.Client, name: str) -> None:
    """vLLM #3536, llama.cpp #7149, Ollama: the field was ignored, and the answer was not what it asks for."""
    assert refusal(door, **{name: {"type": "object"}})["param"] == name


def test_a_range_of_letters_beyond_ascii_is_a_pattern(door: httpx.Client) -> None:
    """vLLM #15210."""
    answer = ask(door, structured_outputs={"regex": "[\x00-\u2e7f]{3}"})
    assert len(text_of(answer)) == 3
    assert all(letter <= "\u2e7f" for letter in text_of(answer))


@pytest.mark.parametrize("stream", [False, True])
def test_a_constraint_holds_with_a_stop_text_that_its_json_has(door: httpx.Client, stream: bool) -> None:
    """vLLM #11089: the answer was empty."""
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    fields: dict[str, Any] = {"response_format": wanted, "stop": ["\n\n", "###"], "max_tokens": 60}
    if stream:
        deltas = (choice["delta"].get("content") for one in events(door, **fields) for choice in one["choices"])
        text = "".join(delta or "" for delta in deltas)
    else:
        text = text_of(ask(door, **fields))
    assert json.loads(text)["city"] in ("Bonn", "Köln")


def test_json_is_not_filled_with_blanks(door: httpx.Client) -> None:
    """vLLM #13260: blanks up to the limit."""
    answer = ask(door, response_format={"type": "json_object"}, max_tokens=24, logit_bias={"198": 100})
    assert "\n\n\n\n" not in text_of(answer)


# --- ends of answers


def test_a_stop_text_over_several_tokens_is_cut_off_whole(door: httpx.Client) -> None:
    """vLLM #3672."""
    whole = text_of(ask(door, COMPLETION, max_tokens=40))
    stop = whole[7:16]
    assert text_of(ask(door, COMPLETION, max_tokens=40, stop=[stop])) == whole.partition(stop)[0]
    kept = ask(door, COMPLETION, max_tokens=40, stop=[stop], include_stop_str_in_output=True)
    assert text_of(kept) == whole.partition(stop)[0] + stop
    streamed = events(door, COMPLETION, max_tokens=40, stop=[stop])
    assert "".join(one["choices"][0]["text"] for one in streamed if one["choices"]) == whole.partition(stop)[0]


def test_a_stop_token_beside_a_stop_text_cuts_nothing_else(door: httpx.Client) -> None:
    """vLLM #3016: the last letters were cut by the length of the stop text."""
    ids = ask(door, COMPLETION, return_token_ids=True)["choices"][0]["token_ids"]
    whole, stopped = ask(door, COMPLETION), ask(door, COMPLETION, stop_token_ids=[ids[6]], stop=["no such text"])
    assert text_of(whole).startswith(text_of(stopped))
    assert stopped["choices"][0]["finish_reason"] == "stop"


def test_no_answer_ends_before_its_least_number_of_tokens(door: httpx.Client) -> None:
    """vLLM: stop texts did not wait for min_tokens."""
    whole = text_of(ask(door, COMPLETION, max_tokens=20))
    answer = ask(door, COMPLETION, max_tokens=20, min_tokens=20, stop=[whole[:3]])
    assert answer["usage"]["completion_tokens"] == 20


def test_deltas_before_the_end_have_no_reason(door: httpx.Client) -> None:
    """Ollama #4357: an empty text, which clients took for an end."""
    reasons = [choice["finish_reason"] for one in events(door) for choice in one["choices"]]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] in ("stop", "length")


def test_each_of_several_streamed_answers_ends_under_its_index(door: httpx.Client) -> None:
    """llama.cpp #20226: all ends had the index 0."""
    found = [choice for one in events(door, n=3, temperature=1, seed=1) for choice in one["choices"]]
    assert sorted(choice["index"] for choice in found if choice["finish_reason"]) == [0, 1, 2]


def test_no_event_of_a_stream_with_a_stop_text_is_empty(door: httpx.Client) -> None:
    """vLLM #13087: the first events had no text."""
    found = [choice for one in events(door, stop=["zzzz"]) for choice in one["choices"]]
    assert all(one["delta"].get("content") or one["delta"].get("role") or one["finish_reason"] for one in found)


def test_emoji_come_whole(door: httpx.Client) -> None:
    """Several tokens make one letter; other servers sent the sign for what cannot be decoded."""
    deltas = [
        choice["delta"].get("content") or ""
        for one in events(door, structured_outputs={"choice": ["🦜🚀 déjà 水門"]}, max_tokens=40)
        for choice in one["choices"]
    ]
    assert "".join(deltas) == "🦜🚀 déjà 水門"
    assert not any("\ufffd" in delta for delta in deltas)


# --- log-probabilities and usage


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {"28": -100}}, {"structured_outputs": {"choice": ["a", "b"]}}, {"top_k": 1}]
)
def test_log_probabilities_are_finite_numbers_of_json(door: httpx.Client, fields: Any) -> None:
    """vLLM, SGLang #5984: 500, because JSON has no infinity."""
    answer = ask(door, logprobs=True, top_logprobs=20, **fields)
    content = answer["choices"][0]["logprobs"]["content"]
    assert content
    assert finite(content)
    assert all(one["logprob"] <= 0 for one in content)


def test_an_echo_with_log_probabilities_takes_any_sampling(door: httpx.Client) -> None:
    """vLLM #10234: 500 with a top_k."""
    answer = ask(door, COMPLETION, echo=True, logprobs=1, temperature=1, top_k=1, max_tokens=2)
    found = answer["choices"][0]["logprobs"]
    assert text_of(answer).startswith("One, two,")
    assert found["token_logprobs"][0] is None
    assert "".join(found["tokens"]) == text_of(answer)


def test_text_offsets_are_places_in_the_text(door: httpx.Client) -> None:
    """vLLM #3110: offsets counted from the wrong place with an echo."""
    answer = ask(door, COMPLETION, prompt="Größe: ", echo=True, logprobs=0, max_tokens=6)
    found, text = answer["choices"][0]["logprobs"], text_of(answer)
    for token, start in zip(found["tokens"], found["text_offset"], strict=True):
        assert text[start:].startswith(token) or "\ufffd" in token or token.startswith("bytes:")


def test_log_probabilities_reach_chats_and_streams_alike(door: httpx.Client) -> None:
    """Ollama #16117: the field was dropped."""
    whole = ask(door, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    found = events(door, logprobs=True, top_logprobs=2)
    parts = [choice["logprobs"]["content"] for one in found for choice in one["choices"] if choice.get("logprobs")]
    assert [token["token"] for part in parts for token in part] == [token["token"] for token in whole]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_the_usage_of_a_stream_comes_last_and_counts_all_answers(door: httpx.Client, path: str) -> None:
    """Ollama #4448, llama.cpp: no usage, or that of one answer alone."""
    *_, last = events(door, path, n=2, ignore_eos=True, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 24
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 24


# --- prompts


@pytest.mark.parametrize("prompt", [["One,", 5], [[5, "two"]], [5, -1], [5, 10**9], [[]], [True]])
def test_a_mixed_or_wrong_list_is_no_prompt(door: httpx.Client, prompt: Any) -> None:
    """llama.cpp #2306 takes mixed lists, OpenAI none: it is refused and not taken for something else."""
    assert refusal(door, COMPLETION, prompt=prompt)["param"].startswith("prompt")


def test_lists_of_ids_are_prompts_of_their_own(door: httpx.Client) -> None:
    """llama.cpp #15001."""
    ids = door.post("/tokenize", json={"prompt": "One, two,"}).json()["tokens"]
    answer = ask(door, COMPLETION, prompt=[ids, ids[:2]])
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert text_of(answer) == text_of(ask(door, COMPLETION))


def test_a_prompt_beyond_the_context_is_refused_and_not_cut(door: httpx.Client) -> None:
    """Ollama #17889: the beginning was cut off, and the answer was 200."""
    error = refusal(door, messages=[{"role": "user", "content": "word " * 20_000}])
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("content", [[{"type": "text", "text": "Count "}, {"type": "text", "text": "to ten."}]])
def test_parts_of_a_text_are_one_text(door: httpx.Client, content: Any) -> None:
    """vLLM #5139: some templates wrote the list itself."""
    one = ask(door, messages=[{"role": "user", "content": "".join(part["text"] for part in content)}])
    parts = ask(door, messages=[{"role": "user", "content": content}])
    assert parts["usage"]["prompt_tokens"] <= one["usage"]["prompt_tokens"] + 1
    assert "text" not in text_of(parts)[:1]


def test_a_picture_is_refused_by_name(door: httpx.Client) -> None:
    """Ollama: models without eyes described a picture that they had not seen."""
    parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]
    assert "image_url" in refusal(door, messages=[{"role": "user", "content": parts}])["message"]


# --- numbers of the sampling


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_seed_repeats_an_answer_beside_others(door: httpx.Client, path: str) -> None:
    """vLLM #5607: equal only if nothing else was computed."""
    alone = text_of(ask(door, path, temperature=1.2, seed=7))
    first, second = (choice for choice in ask(door, path, temperature=1.2, seed=7, n=2)["choices"])
    assert alone == text_of({"choices": [first]})
    assert first != second


@pytest.mark.parametrize("fields", [{"top_k": -1}, {"top_k": 0}, {"top_p": 1}, {"min_p": 0}])
def test_what_switches_an_option_off_changes_nothing(door: httpx.Client, fields: Any) -> None:
    plain = {"temperature": 1.0, "seed": 3, "top_k": 0, "top_p": 1.0, "min_p": 0}
    assert text_of(ask(door, **plain)) == text_of(ask(door, **plain | fields))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"one": 5}),
        ("logit_bias", {"10000000": 5}),
        ("logit_bias", {"5": 1000}),
        ("max_tokens", 0),
        ("n", 0),
        ("top_p", 1.1),
        ("temperature", -0.1),
        ("top_logprobs", 3),
        ("stream_options", {"include_usage": True}),
        ("stop", ["a"] * 100),
        ("stop", [""]),
        ("best_of", 1),
    ],
)
def test_a_number_that_means_nothing_is_refused_by_its_field(door: httpx.Client, field: str, value: Any) -> None:
    extra = {"n": 2} if field == "best_of" else {}
    error = refusal(door, **{field: value, **extra})
    assert field in (error["param"] or "") or field in error["message"]


def test_a_banned_token_never_comes(door: httpx.Client) -> None:
    ids = ask(door, COMPLETION, return_token_ids=True)["choices"][0]["token_ids"]
    bias = {str(one): -100 for one in set(ids)}
    again = ask(door, COMPLETION, return_token_ids=True, logit_bias=bias)["choices"][0]["token_ids"]
    assert not set(ids) & set(again)


# --- responses, messages, embeddings


def test_a_response_continues_calls_and_their_outputs(door: httpx.Client) -> None:
    """vLLM #43244: calls and outputs of the stored response were dropped from what the model reads."""
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "a long answer " * 20}
    items = [{"role": "user", "content": "hi"}, call, output]
    first = door.post("/v1/responses", json={"input": items, "max_output_tokens": 2}).json()
    again = door.post(
        "/v1/responses", json={"previous_response_id": first["id"], "input": "go on", "max_output_tokens": 2}
    ).json()
    assert again["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_vectors_of_both_encodings_are_equal(door: httpx.Client) -> None:
    texts = ["a", "bb"]
    plain = door.post("/v1/embeddings", json={"input": texts}).json()["data"]
    packed = door.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"}).json()["data"]
    for one, other in zip(plain, packed, strict=True):
        size = len(one["embedding"])
        values = struct.unpack(f"<{size}f", base64.b64decode(other["embedding"]))
        assert values == pytest.approx(one["embedding"], abs=1e-6)


def test_tokens_of_a_message_are_counted_as_they_are_used(door: httpx.Client) -> None:
    body = {
        "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        "messages": [USER],
    }
    counted = door.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    used = door.post("/v1/messages", json=body | {"max_tokens": 2}).json()["usage"]
    assert counted == used["input_tokens"] + used.get("cache_read_input_tokens", 0) + used.get(
        "cache_creation_input_tokens", 0
    )


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1/v1/chat/completions"])
def test_a_base_url_with_a_slash_too_many_works_or_is_named(door: httpx.Client, path: str) -> None:
    answered = door.post(path, json={"messages": [USER], "max_tokens": 1})
    assert answered.status_code == 200 or "/v1" in answered.json()["error"]["message"]
