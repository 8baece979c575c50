"""Paths as clients build them from a base URL, with a slash too many, and those of other servers."""

from __future__ import annotations

import re

import httpx
import pytest

from penstock.gateway.other_servers import INSTEAD


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


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/api/chat", "of Ollama, and here it is POST /v1/chat/completions (docs/howto/moving.md)"),
        ("POST", "/api/generate", "of Ollama, and here it is POST /v1/completions ("),
        ("GET", "/api/tags", "of Ollama, and here it is GET /v1/models ("),
        ("HEAD", "/api/blobs/sha256:1", ""),
        ("POST", "/api/pull", "`penstock serve MODEL`"),
        ("POST", "/completion", "of llama-server, and here it is POST /v1/completions ("),
        ("GET", "/props", "of llama-server, "),
        ("POST", "/infill", "of llama-server, "),
        ("GET", "/slots/0", "of llama-server, and here it is GET /v1/jobs"),
        ("POST", "/generate_stream", "of TGI, and here it is POST /v1/completions with "),
        ("GET", "/ping", "of vLLM, and here it is GET /health"),
        ("GET", "/get_model_info", "of SGLang, and here it is GET /v1/models ("),
        ("POST", "/chat/completions", "did you mean /v1/chat/completions?"),
        ("GET", "/models/", "did you mean /v1/models?"),
        ("POST", "/v1/v1/messages", "did you mean /v1/messages?"),
        ("POST", "/v1/nothing", "Not Found: POST /v1/nothing"),
    ],
)
def test_a_route_of_another_server_is_not_found_and_says_ours(
    door: httpx.Client, method: str, path: str, said: str
) -> None:
    answered = door.request(method, path, content=b"{}")
    assert answered.status_code == 404, answered.text
    assert said in answered.text.replace("\\", "")


def test_what_a_404_names_is_served(door: httpx.Client) -> None:
    served = set(door.get("/openapi.json").json()["paths"])
    named = {ours for instead in INSTEAD.values() for ours in instead.values()}
    paths = {
        one.removesuffix("/NAME") for text in named for one in re.findall(r"(?<=[ (])/[\w./]+(?:/NAME)?", f" {text}")
    }
    assert {"/v1/chat/completions", "/health/nodes", "/tokenize"} <= paths
    assert {path for path in paths if path not in served and f"{path}/{{model}}" not in served} == set()
    assert not {theirs for instead in INSTEAD.values() for theirs in instead} & served, "such an entry is never read"
