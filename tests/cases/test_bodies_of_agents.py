"""The bodies of coding agents on the demo model, which is told their tools: what fits is answered to its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.source_tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.process]
FOLDERS = (ROOT / "tests/gateway/agents", ROOT / "tests/gateway/apis/responses/codex")
FILES = sorted(path for folder in FOLDERS for path in folder.rglob("*.json"))
ENDS = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/messages": '"type":"message_stop"',
    "/v1/responses": "data: [DONE]",
}
"""What stands last in a stream."""
ERRORS = ('"error":{', '"type":"error"', "response.failed")
"""What stands in a stream that ends with an error."""
LONG = "water " * 9000
"""More tokens than the context of the demo model, 8,192."""


def request_of(file: Path, model: str) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Return path, headers and body of a recorded request. Codex's are bodies alone."""
    found = json.loads(file.read_text())
    if "path" not in found:
        return "/v1/responses", {}, found | {"model": model, "stream": True, "max_output_tokens": 32}
    path = found["path"].partition("?")[0]
    return path, found["headers"], found["body"] | {"model": model, "stream": True, "max_tokens": 32}


def longer(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with a last message that is too long."""
    member = "input" if "input" in body else "messages"
    return body | {member: [*body[member], {"role": "user", "content": LONG}]}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_body_that_fits_is_answered_to_its_end_and_a_longer_one_is_named(demo_door: httpx.Client, file: Path) -> None:
    model = demo_door.get("/v1/models").json()["data"][0]["id"]
    path, headers, body = request_of(file, model)
    body.pop("max_completion_tokens", None)
    answer = demo_door.post(path, headers=headers, content=json.dumps(body))
    assert answer.status_code == 200, answer.text
    assert ENDS[path] in answer.text.splitlines()[-2 if answer.text.endswith("\n\n") else -1], answer.text[-300:]
    assert not any(word in answer.text for word in ERRORS), answer.text[-500:]
    too_long = demo_door.post(path, headers=headers, content=json.dumps(longer(body)))
    assert (too_long.status_code, "context_length_exceeded" in too_long.text or "too long" in too_long.text) == (
        400,
        True,
    ), too_long.text[:500]
