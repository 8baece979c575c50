"""`/v1/messages/batches`: each request has one result, that of `/v1/messages`."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import redis as sync_redis
from fakes.waiting import wait_until

from tests.gateway.conftest import MODEL, EchoEngine, Stack

F = "penstock:{.files}"
PATH = "/v1/messages/batches"
AGENT = "acme/agent"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def url(stack: Stack, shared_engine: EchoEngine, folder: Path) -> str:
    engine = EchoEngine()
    engine.max_model_len = 1 << 14
    stack.start_node(engine, model=AGENT, pool="agent", tool_parser="hermes", reasoning_parser="think")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_FILES_URL", str(folder))
        patched.setenv("PENSTOCK_FILES_MAX_MESSAGE_BATCH_ROWS", "300")
        patched.setenv("PENSTOCK_FILES_MAX_MESSAGE_BATCH_MIB", "1")
        patched.setenv("PENSTOCK_FILES_MAX_TENANT_BATCHES", "3")
        return str(stack.start_gateway())


@pytest.fixture(autouse=True)
def _end(http: httpx.Client) -> Iterator[None]:
    yield
    for batch in http.get(PATH).json()["data"]:
        if batch["processing_status"] == "in_progress":
            http.post(f"{PATH}/{batch['id']}/cancel")
        if batch["processing_status"] != "ended":
            ended(http, batch["id"])
        assert http.delete(f"{PATH}/{batch['id']}").json() == {"id": batch["id"], "type": "message_batch_deleted"}


def params(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 400, "messages": [{"role": "user", "content": text}], **more}


def request(custom_id: str, text: str = "x", **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": params(text, **more)}


def make(http: httpx.Client, *requests: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = http.post(PATH, json={"requests": requests}, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def wait_for(http: httpx.Client, batch_id: str, when: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    return wait_until(lambda: http.get(f"{PATH}/{batch_id}").json(), when)


def ended(http: httpx.Client, batch_id: str) -> dict[str, Any]:
    return wait_for(http, batch_id, lambda batch: batch["processing_status"] == "ended")


def results_of(http: httpx.Client, batch: dict[str, Any]) -> dict[str, Any]:
    answer = http.get(batch["results_url"])
    assert answer.headers["content-type"] == "application/x-jsonl"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    found = {line["custom_id"]: line["result"] for line in lines}
    assert len(found) == len(lines) == sum(batch["request_counts"].values())
    return found


def counts(**some: int) -> dict[str, int]:
    return {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0, **some}


def test_requests_are_answered_as_messages_are(
    http: httpx.Client, engine: EchoEngine, folder: Path, redis_url: str
) -> None:
    engine.step_s = 0.01
    thinking = {"model": AGENT, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    call = {"name": "weather", "arguments": {"city": "Rome"}}
    tool = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
    asked = [
        request("plain", "a text"),
        request("cut", "a longer text", max_tokens=3),
        request("stop", "before|after", stop_sequences=["|"], metadata={"user_id": "u"}),
        request("thinks", "<think>hm</think>Yes.", **thinking),
        request("calls", f"<tool_call>{json.dumps(call)}</tool_call>", model=AGENT, tools=[tool]),
        request("system", "x", system=[{"type": "text", "text": "Be brief."}]),
        request("wrong", temperature=-1),
        request("streams", stream=True),
        request("no-tools", tools=[tool]),
        request("unknown", model="acme/unknown"),
        request("long", "y" * 300),
        {"custom_id": "empty", "params": {}},
    ]
    batch = make(http, *asked)
    assert (batch["processing_status"], batch["results_url"], batch["ended_at"]) == ("in_progress", None, None)
    assert batch["request_counts"] == counts(processing=12) and batch["type"] == "message_batch"
    assert http.get(f"{PATH}/{batch['id']}/results").json()["error"]["type"] == "not_found_error"
    assert http.delete(f"{PATH}/{batch['id']}").status_code == 409
    batch = ended(http, batch["id"])
    assert batch["request_counts"] == counts(succeeded=6, errored=6), batch
    results = results_of(http, batch)
    with sync_redis.Redis.from_url(redis_url) as redis:
        # Results that are in a part are freed. That of a failed job, for `long`, stays for its time.
        assert len(redis.keys("penstock:{echo}:result:*")) == 1
    for one in asked:
        answer = http.post("/v1/messages", json={**one["params"], "stream": False})
        direct, result = answer.json(), results[one["custom_id"]]
        if one["custom_id"] == "streams":
            assert result["type"] == "errored" and result["error"]["error"]["message"].startswith("stream")
        elif answer.status_code == 200:
            message = result["message"]
            assert message["id"].startswith("msg_echo." if message["model"] == MODEL else "msg_agent.")
            ids = [block.pop("id") for block in (*message["content"], *direct["content"]) if "id" in block]
            assert len(ids) == (2 if one["custom_id"] == "calls" else 0)
            # Only a gateway's own answers are signed.
            signed = [
                block.pop("signature") for block in (*message["content"], *direct["content"]) if "thinking" in block
            ]
            assert (signed[:1], len(signed)) == (([""], 2) if one["custom_id"] == "thinks" else ([], 0))
            assert {**message, "id": ""} == {**direct, "id": ""}
        else:
            assert result == {"type": "errored", "error": {**direct, "request_id": None}}
    assert batch["ended_at"] >= batch["created_at"] and batch["expires_at"][:10] > batch["created_at"][:10]
    assert http.get("/v1/files").json()["data"] == http.get("/v1/batches").json()["data"] == []
    assert http.get(f"/v1/batches/{batch['id']}").status_code == 404
    assert [path.name for path in folder.glob("*/*/*")] == [results_file_of(redis_url, batch["id"])]
    with sync_redis.Redis.from_url(redis_url) as redis:
        assert not redis.exists(f"{F}:rows:{batch['id']}", f"{F}:parts:{batch['id']}", f"{F}:open_batches")


def results_file_of(redis_url: str, batch_id: str) -> str:
    with sync_redis.Redis.from_url(redis_url, decode_responses=True) as redis:
        return str(redis.hget(f"{F}:batch:{batch_id}", "output_file"))


def test_a_large_body_is_split_by_another_process(http: httpx.Client, engine: EchoEngine) -> None:
    asked = [request(f"r{number}", "z" * 20, system="s" * 3000) for number in range(300)]
    batch = make(http, *asked)
    assert batch["request_counts"]["processing"] == 300
    assert ended(http, batch["id"])["request_counts"] == counts(succeeded=300)
    for wrong, status, message in (
        ([*asked, request("one-more")], 400, "requests: must have at most 300 items"),
        ([*asked[1:], asked[1]], 400, "requests[299].custom_id: r1 is also that of requests[0]"),
        ([request("x", system="s" * 1_100_000)], 413, "larger than 1048576 bytes"),
    ):
        answer = http.post(PATH, json={"requests": wrong})
        assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text
    cut = json.dumps({"requests": asked})[:-2].encode()
    answer = http.post(PATH, content=iter([cut]), headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "ends early" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "one member, the list requests"),
        (b'{"requests": []}', "at least 1 item"),
        (b'{"requests": [{"custom_id": "a b", "params": {}}]}', "requests[0].custom_id"),
        (b'{"requests": [{"custom_id": "a"}]}', "requests[0].params: must be an object"),
    ],
)
def test_wrong_bodies_are_refused_in_anthropics_shape(http: httpx.Client, body: bytes, message: str) -> None:
    answer = http.post(PATH, content=body, headers={"content-type": "application/json"})
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error")
    assert message in told["error"]["message"]
    assert http.post(PATH, content=body, headers={"content-type": "text/plain"}).status_code == 400


def test_interrupted_and_slow_bodies_leave_nothing(
    stack: Stack, url: str, folder: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_FILES_URL", str(folder))
    monkeypatch.setenv("PENSTOCK_FILES_MIN_UPLOAD_KIB_PER_S", "500")
    url = stack.start_gateway(body_timeout_s=1.0)
    host, port = str(urlsplit(url).hostname), int(urlsplit(url).port or 0)
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 900000\r\n\r\n"
    start = f'{{"requests":[{json.dumps(request("a", "t" * 100_000))}'.encode()
    with socket.create_connection((host, port)) as gone, socket.create_connection((host, port)) as slow:
        for one in (gone, slow):
            one.sendall(head.encode() + start)
        wait_until(lambda: len([*folder.glob("*/files/*")]) >= 2)
        gone.close()
        slow.settimeout(60)
        answer = b""
        while b"arrives too slowly" not in answer:
            piece = slow.recv(65536)
            assert piece, answer
            answer += piece
    wait_until(lambda: not [*folder.glob("*/files/*")])
    with sync_redis.Redis.from_url(redis_url) as redis:
        assert not redis.exists(f"{F}:uploads", f"{F}:uploading", f"{F}:stored")


def test_canceled_and_expired_requests_have_such_results(
    http: httpx.Client, engine: EchoEngine, redis_url: str
) -> None:
    engine.may_go_on.clear()
    asked = [request("first", "x"), *(request(f"slow{number}", "y" * 200) for number in range(150))]
    batch = make(http, *asked)
    wait_for(http, batch["id"], lambda one: one["answered"] > 0)
    batch = http.post(f"{PATH}/{batch['id']}/cancel").json()
    assert (batch["processing_status"], batch["request_counts"]["processing"]) == ("canceling", 151)
    assert batch["cancel_initiated_at"] is not None
    batch = ended(http, batch["id"])
    results = results_of(http, batch)
    assert results["first"]["type"] == "succeeded" and results["slow149"] == {"type": "canceled"}
    assert batch["request_counts"]["canceled"] >= 80 and batch["request_counts"]["errored"] == 0
    assert http.post(f"{PATH}/{batch['id']}/cancel").json()["error"]["type"] == "invalid_request_error"

    batch = make(http, *asked)
    assert http.post(f"{PATH}/{batch['id']}/pause").json()["paused"]
    with sync_redis.Redis.from_url(redis_url) as redis:
        redis.hset(f"{F}:batch:{batch['id']}", "expires_at", int(time.time() * 1000))
        # Another holder reads the time anew.
        redis.hincrby(f"{F}:batch:{batch['id']}", "token", 1)
        redis.zadd(f"{F}:open_batches", {batch["id"]: 0})
    batch = ended(http, batch["id"])
    assert {one["type"] for one in results_of(http, batch).values()} <= {"succeeded", "expired"}
    assert batch["request_counts"]["expired"] >= 80 and batch["ended_at"] is not None


def test_pages_keys_and_limits(http: httpx.Client, engine: EchoEngine) -> None:
    first = make(http, request("a"), **{"Idempotency-Key": "one"})
    assert make(http, request("a"), **{"Idempotency-Key": "one"})["id"] == first["id"]
    answer = http.post(PATH, json={"requests": [request("b")]}, headers={"Idempotency-Key": "one"})
    assert answer.status_code == 409 and "Idempotency-Key" in answer.json()["error"]["message"]
    ids = [make(http, request("a"))["id"], first["id"]]
    ids.insert(0, make(http, request("a"))["id"])

    def page(**query: Any) -> tuple[list[str], bool]:
        listed = http.get(PATH, params=query).json()
        found = [one["id"] for one in listed["data"]]
        assert (listed["first_id"], listed["last_id"]) == ((found[0], found[-1]) if found else (None, None))
        return found, listed["has_more"]

    assert page() == (ids, False)
    assert page(limit=2) == (ids[:2], True)
    assert page(limit=2, after_id=ids[1]) == (ids[2:], False)
    assert page(limit=1, before_id=ids[2]) == (ids[1:2], True)
    for query in ({"limit": 0}, {"after_id": "none"}, {"after_id": ids[0], "before_id": ids[1]}, {"order": "asc"}):
        assert http.get(PATH, params=query).status_code == 400
    for one in ids:
        ended(http, one)
    engine.may_go_on.clear()
    for _ in range(3):
        make(http, request("a", "y" * 100))
    answer = http.post(PATH, json={"requests": [request("a")]})
    assert answer.status_code == 429 and "PENSTOCK_FILES_MAX_TENANT_BATCHES" in answer.json()["error"]["message"]
    engine.may_go_on.set()


def test_results_are_archived_after_29_days(http: httpx.Client, redis_url: str) -> None:
    batch = ended(http, make(http, request("a"))["id"])
    with sync_redis.Redis.from_url(redis_url, decode_responses=True) as redis:
        created_ms = int(str(redis.hget(f"{F}:batch:{batch['id']}", "created_at")))
        file = results_file_of(redis_url, batch["id"])
        life_days = (float(str(redis.hget(f"{F}:file:{file}", "expires"))) - created_ms) / 86_400_000
        assert life_days == pytest.approx(29, abs=0.001)
        assert float(str(redis.zscore(f"{F}:expiry", f"batch:{batch['id']}"))) - created_ms > 29.5 * 86_400_000
        redis.hset(f"{F}:batch:{batch['id']}", "created_at", created_ms - 29 * 86_400_000)
    batch = http.get(f"{PATH}/{batch['id']}").json()
    assert batch["archived_at"] is not None and batch["results_url"] is None
