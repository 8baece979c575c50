"""Rows of batches: each is a body of its endpoint, and gets the answer that HTTP gives."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fakes.waiting import wait_until

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Tell the weather.", "parameters": WEATHER, "strict": True}

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "max_completion_tokens": 32,
    },
    "/v1/completions": {"prompt": ["One, two,", "Once upon a"], "n": 2, "logprobs": 1, "max_tokens": 4},
    "/v1/responses": {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "What is the time?"},
            {"type": "custom_tool_call", "call_id": "call00001", "name": "clock", "input": "now"},
            {"type": "custom_tool_call_output", "call_id": "call00001", "output": "noon"},
        ],
        "tools": [{"type": "custom", "name": "clock"}, {"type": "function", **TOOL}],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "clock"}]},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "max_output_tokens": 32,
        "store": False,
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
        "tools": [{"name": "weather", "input_schema": WEATHER, "strict": True}],
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"},
        "max_tokens": 32,
    },
    "/v1/embeddings": {"input": ["a text", [1, 2, 3]], "encoding_format": "base64", "dimensions": 8},
}
OF_ONE_REQUEST = {"id", "created", "created_at", "completed_at", "service_tier", "call_id", "tool_call_id", "notice"}
"""Members that differ between two answers of one body."""
OF_CACHES = {"prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens", "input_tokens"}


def shown(answer: Any) -> Any:
    """Return what two answers of one body have in common."""
    if isinstance(answer, dict):
        return {name: shown(one) for name, one in answer.items() if name not in OF_ONE_REQUEST | OF_CACHES}
    return [shown(one) for one in answer] if isinstance(answer, list) else answer


def batch_of(door: httpx.Client, url: str, *bodies: dict[str, Any]) -> dict[str, Any]:
    rows = [{"custom_id": str(at), "method": "POST", "url": url, "body": body} for at, body in enumerate(bodies)]
    content = "\n".join(map(json.dumps, rows)).encode()
    file = door.post("/v1/files", files={"file": ("rows.jsonl", content)}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
    batch = door.post("/v1/batches", json=asked)
    assert batch.status_code == 200, batch.text
    return dict(batch.json())


def lines_of(door: httpx.Client, batch: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    path = f"/v1/batches/{batch['id']}"
    batch = wait_until(lambda: door.get(path).json(), lambda one: one["status"] in ("completed", "failed"))
    assert batch["status"] == "completed", batch
    file_id = batch[f"{kind}_file_id"]
    return [] if file_id is None else list(map(json.loads, door.get(f"/v1/files/{file_id}/content").text.splitlines()))


def body_of(door: httpx.Client, url: str) -> dict[str, Any]:
    sampling = {} if url == "/v1/embeddings" else {"temperature": 0}
    return {"model": door.get("/v1/models").json()["data"][0]["id"], **BODIES[url], **sampling}


@pytest.mark.model
def test_a_row_has_the_answer_of_its_endpoint(tooled: httpx.Client) -> None:
    batches = {url: batch_of(tooled, url, body_of(tooled, url)) for url in BODIES}
    for url, batch in batches.items():
        answer = tooled.post(url, json=body_of(tooled, url), timeout=60)
        assert answer.status_code == 200, answer.text
        failed = lines_of(tooled, batch, "error")
        assert not failed, failed
        (row,) = lines_of(tooled, batch, "output")
        assert shown(row["response"]["body"]) == shown(answer.json()), url


@pytest.mark.parametrize(
    ("url", "more", "param"),
    [
        ("/v1/chat/completions", {"stream": True}, "stream"),
        ("/v1/chat/completions", {"priority": "interactive"}, "priority"),
        ("/v1/responses", {"store": True}, "store"),
        ("/v1/responses", {"background": True}, "background"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_0_x"}]}, "input"),
        ("/v1/responses", {"tools": [{"type": "function"}]}, "tools[0]"),
        ("/v1/completions", {"prompt": ["x"] * 64, "n": 5}, "n"),
        ("/v1/messages", {"stream": True}, "stream"),
        ("/v1/embeddings", {"priority": "batch"}, "priority"),
    ],
)
def test_what_a_row_cannot_say_is_refused_by_name(url: str, more: dict[str, Any], param: str) -> None:
    from penstock.contract.errors import RequestError
    from penstock.producer.batch.request import request_of

    with pytest.raises(RequestError) as caught:
        request_of(url, {"model": "m", **BODIES[url], **more})
    assert caught.value.param == param
