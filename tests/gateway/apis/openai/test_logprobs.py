"""Log-probabilities in OpenAI's two formats: equal in whole answers and streams, also after a reconnect."""

from __future__ import annotations

import json
from typing import Any

import pytest

MODEL = "acme/echo"
SAID = "a 🐢ż"
BYTES = list(SAID.encode())
JOB = "x-penstock-job"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def join(parts: list[dict[str, Any] | None]) -> dict[str, list[Any]]:
    """Concatenate the lists of several objects."""
    joined: dict[str, list[Any]] = {}
    for part in filter(None, parts):
        for name, values in part.items():
            joined[name] = joined.get(name, []) + (values or [])
    return joined


def completion(api, *, stream: bool, **options: Any) -> dict[int, tuple[str, dict[str, list[Any]]]]:
    """Return text and log-probabilities of each choice."""
    answer = api.completions.create(model=MODEL, max_tokens=64, stream=stream, **options)
    choices = [choice for piece in answer for choice in piece.choices] if stream else answer.choices
    said = {choice.index: [one for one in choices if one.index == choice.index] for choice in choices}
    return {
        index: ("".join(one.text for one in own), join([one.logprobs and one.logprobs.model_dump() for one in own]))
        for index, own in said.items()
    }


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion_have_tokens_values_and_offsets(api, stream):
    (text, likely) = completion(api, stream=stream, prompt=SAID, logprobs=2)[0]
    assert text == SAID
    assert likely["tokens"] == ["a", " ", *(f"bytes:\\x{byte:02x}" for byte in BYTES[2:])]
    assert likely["token_logprobs"] == [-1.0] * len(BYTES)
    assert likely["top_logprobs"][0] == {"a": -1.0, "b": -2.0}
    # A character counts where its last byte is.
    assert likely["text_offset"] == [0, 1, 2, 2, 2, 2, 3, 3]


def test_zero_alternatives_report_only_the_token_itself(api):
    (_, likely) = completion(api, stream=False, prompt="ab", logprobs=0)[0]
    assert likely["top_logprobs"] == [{"a": -1.0}, {"b": -1.0}]


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_of_every_prompt_has_its_own_logprobs(api, stream):
    said = completion(api, stream=stream, prompt=["abc", "de"], n=2, logprobs=1, echo=True)
    for index, prompt in enumerate(("abc", "abc", "de", "de")):
        text, likely = said[index]
        assert text == prompt + prompt
        if index % 2 == 0:
            assert likely["tokens"] == list(prompt + prompt)
            assert likely["token_logprobs"] == [None] + [-1.0] * (2 * len(prompt) - 1)
            assert likely["top_logprobs"][0] is None
            assert likely["text_offset"] == list(range(2 * len(prompt)))
        else:
            # The prompt's own stand in its first choice alone.
            assert likely["tokens"] == list(prompt)
            assert likely["token_logprobs"] == [-1.0] * len(prompt)
            assert likely["text_offset"] == list(range(len(prompt), 2 * len(prompt)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [SAID, BYTES, "x" * 200])
def test_an_echo_without_logprobs_is_text_alone(api, stream, prompt):
    text, likely = completion(api, stream=stream, prompt=prompt, echo=True)[0]
    said = prompt if isinstance(prompt, str) else SAID
    assert (text, likely) == (said + said[:64], {})


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_prompt_are_in_its_first_choice(api, stream):
    asked = {"model": MODEL, "prompt": [97, 98, 127], "n": 2, "extra_body": {"prompt_logprobs": 1}}
    answer = api.completions.create(stream=stream, **asked)
    (first, *rest) = answer if stream else [answer]
    assert not any("prompt_logprobs" in choice.model_dump() for piece in rest for choice in piece.choices)
    assert [choice.index for choice in first.choices] == ([0] if stream else [0, 1])
    assert not any("prompt_logprobs" in choice.model_dump() for choice in first.choices[1:])
    assert first.choices[0].logprobs is None
    assert first.choices[0].model_dump()["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -1.0, "decoded_token": "b"}},
        {"127": {"logprob": -1.0, "decoded_token": "<end>"}},
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat_have_bytes_and_alternatives(api, stream):
    options = {"model": MODEL, "messages": user(SAID), "n": 2, "logprobs": True, "top_logprobs": 2}
    answer = api.chat.completions.create(stream=stream, **options)
    choices = [choice for piece in answer for choice in piece.choices] if stream else answer.choices
    for index in range(2):
        own = [choice for choice in choices if choice.index == index]
        content = [one for choice in own if choice.logprobs for one in choice.logprobs.content]
        assert bytes(byte for one in content for byte in one.bytes).decode() == SAID
        assert [(one.token, one.logprob) for one in content][:2] == [("a", -1.0), (" ", -1.0)]
        tops = [[(top.token, top.logprob, top.bytes) for top in one.top_logprobs] for one in content]
        assert tops[0] == [("a", -1.0, [97]), ("b", -2.0, [98])]


def test_logprobs_of_a_chat_may_have_no_alternatives(api):
    answer = api.chat.completions.create(model=MODEL, messages=user("ab"), logprobs=True)
    assert [one.top_logprobs for one in answer.choices[0].logprobs.content] == [[], []]


def test_logprobs_of_a_long_prompt_come_in_parts_before_the_text(api):
    prompt = [1 + i % 100 for i in range(200)]
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "extra_body": {"prompt_logprobs": 0}}
    (whole,) = api.completions.create(**asked).choices
    pieces = [piece.choices[0] for piece in api.completions.create(stream=True, **asked)]
    parts = [piece.model_dump().get("prompt_logprobs") for piece in pieces]
    assert [entry for part in parts if part for entry in part] == whole.model_dump()["prompt_logprobs"]
    assert [bool(part) for part in parts] == sorted((bool(part) for part in parts), reverse=True)
    assert "".join(piece.text for piece in pieces) == whole.text


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": SAID, "logprobs": 1, "echo": True},
        {"prompt": "x" * 200, "max_tokens": 3, "prompt_logprobs": 1},
        {"prompt": "x" * 200, "max_tokens": 3, "prompt_logprobs": 0, "logprobs": 2, "n": 2},
    ],
)
def test_resumed_stream_continues_with_the_right_offsets(http, engine, options):
    engine.step_s = 0.01
    body = {"model": MODEL, "max_tokens": 64, "stream": True} | options
    whole = http.post("/v1/completions", json=body, headers={"idempotency-key": " ".join(options)})

    def pieces(response) -> list[tuple[str, Any]]:
        blocks = [block.split("\n") for block in response.text.removesuffix("\n\n").split("\n\n")][:-1]
        return [(head.removeprefix("id: "), json.loads(data.removeprefix("data: "))) for head, data in blocks]

    events = pieces(whole)
    assert len(events) > 3
    for cut in (0, 1, 3):
        place = {"last-event-id": events[cut][0]}
        rest = pieces(http.post("/v1/completions", json=body, headers=place))
        assert [(at, piece["choices"]) for at, piece in rest] == [(at, p["choices"]) for at, p in events[cut + 1 :]]
