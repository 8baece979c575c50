"""Each API is a guest of the gateway: without its folder and its row, the app starts and the other APIs answer."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.gateway.without_guest import ASKED
from tests.source_tree import ROOT

GUESTS = sorted(path.parent.name for path in (ROOT / "gateway/apis").glob("*/__init__.py"))


@pytest.fixture(scope="module")
def found(redis_url: str) -> dict[str, Any]:
    program = [sys.executable, str(ROOT / "tests/gateway/without_guest.py"), redis_url, *GUESTS]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=True)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("guest", GUESTS)
def test_the_app_starts_without_an_api_and_the_others_answer(found: dict[str, Any], guest: str) -> None:
    complete, without = found["all"], found[guest]
    assert 404 not in complete["statuses"].values()
    assert without["statuses"] == {**complete["statuses"], **({guest: 404} if guest in ASKED else {})}


@pytest.mark.parametrize("guest", [guest for guest in GUESTS if guest not in ("api_docs", "websocket")])
def test_the_document_lacks_the_paths_of_a_missing_api(found: dict[str, Any], guest: str) -> None:
    """What is left is as in the whole document, which another test validates. A WebSocket is in none."""
    left, complete = found[guest]["operations"], found["all"]["operations"]
    changed = {path for path, operations in left.items() if operations != complete[path]}
    assert len(left) < len(complete)
    # Two APIs have a path together.
    shared = {"anthropic": {"/v1/messages/batches"}, "tasks": {"/"}}
    assert changed == shared.get(guest, set())
    assert found[guest]["missing"] == []


def test_a_job_cannot_hold_the_body_of_a_missing_api(found: dict[str, Any]) -> None:
    status, message = found["responses"]["job"]
    assert (status, message) == (400, "url: this gateway does not have /v1/responses")
    assert found["all"]["job"][1] != message
