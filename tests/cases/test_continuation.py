"""An answer that was cut goes on where it ended: what is generated in parts is what is generated at once."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

QUESTION = {"role": "user", "content": "Write one sentence about each of five rivers."}
PART, NUM_PARTS = 8, 3


@pytest.fixture(scope="module")
def door(demo_door: httpx.Client) -> httpx.Client:
    return demo_door


def chat(door: httpx.Client, said: str, max_tokens: int) -> str:
    answer = {"messages": [QUESTION, {"role": "assistant", "content": said}], "continue_final_message": True}
    body = {"max_tokens": max_tokens, **(answer if said else {"messages": [QUESTION]})}
    return str(answer_to(door, "/v1/chat/completions", body)["choices"][0]["message"]["content"])


def response(door: httpx.Client, said: str, max_tokens: int) -> str:
    answer = {"input": [QUESTION, {"role": "assistant", "content": said}], "continue_final_message": True}
    body = {"max_output_tokens": max_tokens, "instructions": "Be brief.", **(answer if said else {"input": [QUESTION]})}
    return str(answer_to(door, "/v1/responses", body)["output"][0]["content"][0]["text"])


def completion(door: httpx.Client, said: str, max_tokens: int) -> str:
    body = {"max_tokens": max_tokens, "prompt": f"The longest rivers are{said}"}
    return str(answer_to(door, "/v1/completions", body)["choices"][0]["text"])


def answer_to(door: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    model = door.get("/v1/models").json()["data"][0]["id"]
    return door.post(path, json={"model": model, "temperature": 0, **body}).raise_for_status().json()


@pytest.mark.parametrize("generate", [chat, response, completion])
def test_parts_of_an_answer_are_the_whole_of_it(door: httpx.Client, generate: Any) -> None:
    said = ""
    for _ in range(NUM_PARTS):
        said += generate(door, said, PART)
    assert said == generate(door, "", NUM_PARTS * PART)
