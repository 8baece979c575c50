"""Paths as clients build them from a base URL, with a slash too many."""

from __future__ import annotations

import httpx
import pytest


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}])
def test_a_list_of_models_with_a_slash_at_its_end_is_the_list(door: httpx.Client, headers: dict[str, str]) -> None:
    """vLLM and llama.cpp redirect or answer; here it asked for a model without a name."""
    want, got = (door.get(path, headers=headers) for path in ("/v1/models", "/v1/models/"))
    assert got.status_code == 200, got.text
    assert got.json() == want.json()
    assert door.get("/v1/models/nope").json()["error"]["message"] == "no model 'nope' is served"


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize("path", ["//v1/chat/completions", "/v1//chat/completions", "///v1/chat/completions"])
def test_repeated_slashes_are_one(door: httpx.Client, path: str) -> None:
    base = f"{door.base_url}".rstrip("/")
    assert door.post(base + path, json=CHAT).json()["object"] == "chat.completion"
    assert door.get(f"{base}//v1//models").json()["object"] == "list"
    assert door.get(f"{base}//health").status_code == 200
    assert door.get(f"{base}//admin").status_code == door.get("/admin").status_code


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/v1/messages", "its base URL must not end in /v1"),
        ("/v1/v1/chat/completions", "its base URL must not end in /v1"),
        ("/chat/completions", "the client's base URL must end in /v1"),
        ("/responses", "the client's base URL must end in /v1"),
    ],
)
def test_a_wrong_base_url_is_named(door: httpx.Client, path: str, said: str) -> None:
    refused = door.post(path, json=CHAT)
    assert refused.status_code == 404
    assert refused.json()["error"]["message"].endswith(said)


def test_a_stream_of_a_job_begins_at_its_start_after_minus_one(door: httpx.Client) -> None:
    job = door.post("/v1/jobs", json=CHAT).json()["id"]
    texts = [door.get(f"/v1/jobs/{job}/stream{query}").text for query in ("", "?after=", "?after=-1")]
    assert texts[0] and len(set(texts)) == 1
    assert door.get(f"/v1/jobs/{job}/stream?after=-2").status_code == 400
