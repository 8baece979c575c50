"""`/v1/batches` through OpenAI's official client: each row of the input is in the output or in the error file, once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
import redis as sync_redis
from fakes.waiting import wait_until
from openai.types import Batch

from tests.gateway.conftest import MODEL, EchoEngine, Stack

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
F = "penstock:{.files}"
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def url(stack: Stack, shared_engine: EchoEngine, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_FILES_URL", str(folder))
        patched.setenv("PENSTOCK_FILES_MAX_BATCH_ROWS", "300")
        patched.setenv("PENSTOCK_FILES_MAX_TENANT_BATCHES", "3")
        return str(stack.start_gateway())


def row(custom_id: str, text: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    messages = {"messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **messages, **body}}


def upload(api: openai.OpenAI, rows: Sequence[Any], purpose: Any = "batch") -> str:
    lines = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows)
    return api.files.create(file=("rows.jsonl", lines.encode()), purpose=purpose).id


def make(api: openai.OpenAI, rows: Sequence[Any], window: Any = "24h", endpoint: Any = CHAT, **more: Any) -> Batch:
    return api.batches.create(input_file_id=upload(api, rows), endpoint=endpoint, completion_window=window, **more)


def wait_for(api: openai.OpenAI, batch_id: str, when: Callable[[Batch], bool]) -> Batch:
    return wait_until(lambda: api.batches.retrieve(batch_id), when)


def ended(api: openai.OpenAI, batch_id: str) -> Batch:
    return wait_for(api, batch_id, lambda batch: batch.status in ENDED)


def lines_of(api: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in api.files.content(file_id).text.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_webhook_endpoints_are_told_of_the_end_of_a_batch(api: openai.OpenAI, url: str) -> None:
    """The receiver does not exist, so the delivery stays pending."""
    types: Any = ["batch.completed"]
    endpoint = api.webhooks.create(url="https://receiver.invalid/hook", name="ends", event_types=types)
    done = ended(api, make(api, [row("r", "text")]).id)
    path = f"{url}/v1/webhook_endpoints/{endpoint.id}/deliveries"
    found = wait_until(lambda: httpx.get(path, params={"status": "pending"}, timeout=60).json()["data"])
    assert [(one["event_type"], one["data"]["id"]) for one in found] == [("batch.completed", done.id)]
    api.webhooks.delete(endpoint.id)


def test_a_batch_answers_its_rows(api: openai.OpenAI, folder: Path, redis_url: str) -> None:
    rows = [row(f"r{i}", f"text {i}") for i in range(100)] + [row("wrong", "x", temperature=-1)]
    batch = make(api, rows, metadata={"project": "rivers"})
    assert (batch.status, batch.metadata, batch.output_file_id) == ("validating", {"project": "rivers"}, None)
    batch = ended(api, batch.id)
    assert batch.status == "completed" and batch.errors is None and batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 101, "completed": 100, "failed": 1}
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert None not in times and times == sorted(times, key=lambda one: one or 0)
    assert batch.expires_at == batch.created_at + 86_400
    output, errors = lines_of(api, batch.output_file_id), lines_of(api, batch.error_file_id)
    assert output.keys() == {f"r{i}" for i in range(100)}
    texts = {name: one["response"]["body"]["choices"][0]["message"]["content"] for name, one in output.items()}
    assert texts == {f"r{i}": f"text {i}" for i in range(100)}
    assert [*errors] == ["wrong"] and "temperature" in errors["wrong"]["error"]["message"]
    usages = [one["response"]["body"]["usage"] for one in output.values()]
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(one["prompt_tokens"] for one in usages)
    assert batch.usage.output_tokens == sum(one["completion_tokens"] for one in usages)
    file = api.files.retrieve(str(batch.output_file_id))
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert list(folder.glob("*/parts/*")) == []
    with sync_redis.Redis.from_url(redis_url) as redis:
        # Results that are in a part are freed, and nothing else is left than the record.
        assert redis.keys("penstock:{echo}:result:*") == []
        assert not redis.exists(f"{F}:rows:{batch.id}", f"{F}:parts:{batch.id}", f"{F}:open_batches", f"{F}:rows_left")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{not json", "invalid_json_line"),
        (row("a", "twice"), "duplicate_custom_id"),
        (row("b", "x", url="/v1/completions"), "mismatched_endpoint"),
        ({**row("b", "x"), "custom_id": ""}, "invalid_custom_id"),
        ({**row("b", "x"), "method": "GET"}, "invalid_method"),
        ({**row("b", "x"), "body": []}, "invalid_body"),
    ],
)
def test_wrong_lines_are_named(api: openai.OpenAI, line: Any, code: str) -> None:
    batch = ended(api, make(api, [row("a", "x"), "", line]).id)
    assert (batch.status, batch.output_file_id, batch.in_progress_at) == ("failed", None, None)
    assert batch.failed_at is not None and batch.errors is not None and batch.errors.data is not None
    assert [(one.code, one.line) for one in batch.errors.data] == [(code, 3)]


def test_a_row_with_an_unknown_model_fails_alone_and_a_batch_of_them_as_a_whole(api: openai.OpenAI) -> None:
    wrong = [row(f"w{i}", "x", model="acme/unknown") for i in range(2)]
    batch = ended(api, make(api, [row("a", "text"), *wrong]).id)
    assert batch.status == "completed" and batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
    assert [*lines_of(api, batch.output_file_id)] == ["a"]
    errors = lines_of(api, batch.error_file_id)
    assert {name: one["error"]["code"] for name, one in errors.items()} == dict.fromkeys(
        ("w0", "w1"), "model_not_found"
    )
    batch = ended(api, make(api, wrong).id)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    assert [(one.code, one.line) for one in batch.errors.data] == [("model_not_found", 1)]


def test_too_many_rows_and_no_rows(api: openai.OpenAI) -> None:
    codes = []
    for rows in ([row(f"{i}", "x") for i in range(301)], ["", "  "]):
        errors = ended(api, make(api, rows).id).errors
        assert errors is not None and errors.data is not None
        codes.append([one.code for one in errors.data])
    assert codes == [["too_many_rows"], ["empty_file"]]


def test_wrong_batches_are_refused(api: openai.OpenAI, http: httpx.Client) -> None:
    data = upload(api, [row("a", "x")], purpose="user_data")
    file = upload(api, [row("a", "x")])
    whole = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    for change, param in (
        ({"input_file_id": data}, "input_file_id"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/lunch"}, "endpoint"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"colour": "red"}, "colour"),
        ({"max_attempts": 9}, "max_attempts"),
        ({"retry_backoff_s": -1}, "retry_backoff_s"),
    ):
        answer = http.post("/v1/batches", json={**whole, **change})
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["param"].startswith(param), answer.text
    with pytest.raises(openai.NotFoundError, match="no batch"):
        api.batches.retrieve("batch_" + "0" * 32)


def test_cancel_keeps_answers_and_names_the_other_rows(api: openai.OpenAI, engine: EchoEngine) -> None:
    fast = [row(f"fast{i}", "x") for i in range(5)]
    slow = [row(f"slow{i}", "y" * 200) for i in range(250)]
    engine.may_go_on.clear()
    batch = make(api, fast + slow)
    wait_for(api, batch.id, lambda one: one.request_counts is not None and one.request_counts.completed >= 5)
    with pytest.raises(openai.ConflictError, match="open batch"):
        api.files.delete(batch.input_file_id)
    assert api.batches.cancel(batch.id).status == "cancelling"
    batch = ended(api, batch.id)
    assert batch.status == "cancelled" and batch.cancelled_at is not None
    output, errors = lines_of(api, batch.output_file_id), lines_of(api, batch.error_file_id)
    assert output.keys() >= {f"fast{i}" for i in range(5)}
    assert output.keys() | errors.keys() == {one["custom_id"] for one in fast + slow}
    assert not output.keys() & errors.keys()
    assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError, match="cancelled"):
        api.batches.cancel(batch.id)
    assert api.files.delete(batch.input_file_id).deleted


def test_rows_of_a_running_batch_can_be_read(api: openai.OpenAI, http: httpx.Client, engine: EchoEngine) -> None:
    rows = [row(f"fast{i}", "x") for i in range(5)] + [row("wrong", "x", temperature=-1)]
    engine.may_go_on.clear()
    batch = make(api, [*rows[:3], "", *rows[3:], row("slow", "y" * 200)])
    path = f"/v1/batches/{batch.id}"
    assert http.get(f"{path}/output").content == b""
    wait_for(api, batch.id, lambda one: (counts := one.request_counts) is not None and counts.completed == 5)
    some, failed = http.get(f"{path}/output"), http.get(f"{path}/errors").json()
    assert {json.loads(line)["custom_id"] for line in some.text.splitlines()} == {f"fast{i}" for i in range(5)}
    assert (failed["line"], failed["custom_id"]) == (7, "wrong")
    start = {"range": f"bytes={len(some.content)}-"}
    nothing = http.get(f"{path}/output", headers=start)
    assert (nothing.status_code, nothing.json()["error"]["code"]) == (416, "range_not_satisfiable")
    assert http.get(f"{path}/output", headers={"range": "bytes=3-9"}).content == some.content[3:10]
    engine.may_go_on.set()
    done = ended(api, batch.id)
    rest = http.get(f"{path}/output", headers=start)
    whole = api.files.content(str(done.output_file_id)).content
    assert (rest.status_code, some.content + rest.content) == (206, whole)
    assert http.get(f"{path}/output").content == whole
    assert http.get(f"{path}/errors").content == api.files.content(str(done.error_file_id)).content
    assert http.get("/v1/batches/none/output").status_code == 404


def test_a_lost_input_fails_its_batch_and_keeps_its_answers(
    api: openai.OpenAI, http: httpx.Client, engine: EchoEngine, folder: Path, redis_url: str
) -> None:
    def lose(file_id: str) -> None:
        (path,) = folder.glob(f"*/files/{file_id}")
        path.unlink()

    engine.may_go_on.clear()
    batch = make(api, [*(row(f"fast{i}", "x") for i in range(3)), row("slow", "y" * 200)])
    wait_for(api, batch.id, lambda one: (counts := one.request_counts) is not None and counts.completed == 3)
    lose(batch.input_file_id)
    with sync_redis.Redis.from_url(redis_url) as redis:
        # Another holder reads the input anew.
        redis.hincrby(f"{F}:batch:{batch.id}", "token", 1)
        redis.zadd(f"{F}:open_batches", {batch.id: 0})
    file_id = upload(api, [row("a", "x")])
    lose(file_id)
    unread = api.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
    for one in (ended(api, batch.id), ended(api, unread.id)):
        assert one.status == "failed" and one.failed_at is not None and one.errors is not None and one.errors.data
        assert [problem.code for problem in one.errors.data] == ["input_lost"]
    assert lines_of(api, api.batches.retrieve(batch.id).output_file_id).keys() == {f"fast{i}" for i in range(3)}
    # What runs of it ends before another test.
    engine.may_go_on.set()


def test_a_batch_expires(api: openai.OpenAI, engine: EchoEngine, redis_url: str) -> None:
    engine.may_go_on.clear()
    batch = make(api, [row(f"r{i}", "y" * 200) for i in range(80)])
    wait_for(api, batch.id, lambda one: one.status == "in_progress")
    http_pause(api, batch.id)
    with sync_redis.Redis.from_url(redis_url) as redis:
        redis.hset(f"{F}:batch:{batch.id}", "expires_at", int(time.time() * 1000))
        # Another holder reads the time anew.
        redis.hincrby(f"{F}:batch:{batch.id}", "token", 1)
        redis.zadd(f"{F}:open_batches", {batch.id: 0})
    batch = ended(api, batch.id)
    assert batch.status == "expired" and batch.expired_at is not None
    errors = lines_of(api, batch.error_file_id)
    assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}
    assert len(errors) + len(lines_of(api, batch.output_file_id)) == 80
    assert batch.request_counts is not None and batch.request_counts.failed == len(errors)


def http_pause(api: openai.OpenAI, batch_id: str) -> dict[str, Any]:
    return api.post(f"/batches/{batch_id}/pause", cast_to=dict[str, Any])


def num_jobs_of(http: httpx.Client) -> int:
    return sum(one["jobs"] for one in http.get("/v1/usage").json()["data"])


def test_pause_and_resume(api: openai.OpenAI, http: httpx.Client, engine: EchoEngine, redis_url: str) -> None:
    """Rows that are in the queue by then are answered, and no others before the batch goes on."""
    with sync_redis.Redis.from_url(redis_url) as redis:
        wait_until(lambda: not redis.scard("penstock:{echo}:open"))  # jobs of earlier tests
        before = num_jobs_of(http)
        engine.may_go_on.clear()
        batch = make(api, [row(f"r{i}", "some text") for i in range(150)])
        wait_for(api, batch.id, lambda one: one.status == "in_progress")
        assert http_pause(api, batch.id)["paused"] is True
        # The holder learns it when it renews its lease.
        lease_ms = redis.zscore(f"{F}:open_batches", batch.id)
        wait_for(api, batch.id, lambda one: redis.zscore(f"{F}:open_batches", one.id) != lease_ms)
        engine.may_go_on.set()

        def rests(one: Batch) -> bool:
            num_answered = 0 if one.request_counts is None else one.request_counts.completed
            return 0 < num_answered == num_jobs_of(http) - before and not redis.scard("penstock:{echo}:open")

        resting = wait_for(api, batch.id, rests).request_counts
        assert resting is not None and resting.completed < 150
        time.sleep(0.2)
        assert api.batches.retrieve(batch.id).request_counts == resting
        assert not redis.scard("penstock:{echo}:open")
    api.post(f"/batches/{batch.id}/resume", cast_to=dict[str, Any])
    batch = ended(api, batch.id)
    assert batch.request_counts is not None and batch.request_counts.completed == 150


def test_a_key_makes_one_batch_and_pages_list_all(api: openai.OpenAI) -> None:
    with_key: Any = {"extra_headers": {"Idempotency-Key": "one-batch"}}
    content = json.dumps(row("a", "x")).encode()
    # The same key is another one for files.
    file = api.files.create(file=("rows.jsonl", content), purpose="batch", **with_key).id
    first = api.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h", **with_key)
    again = api.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h", **with_key)
    assert again.id == first.id
    assert api.files.create(file=("rows.jsonl", content), purpose="batch", **with_key).id == file
    with pytest.raises(openai.ConflictError, match="Idempotency-Key"):
        api.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}, **with_key)
    second = make(api, [row("a", "x")])
    listed = [one.id for one in api.batches.list(limit=1)]
    assert listed[:2] == [second.id, first.id] and len(set(listed)) == len(listed)
    for one in (first, second):
        assert ended(api, one.id).status == "completed"


def test_open_batches_are_limited(api: openai.OpenAI, engine: EchoEngine) -> None:
    engine.may_go_on.clear()
    made = [make(api, [row("a", "y" * 100)]).id for _ in range(3)]
    with pytest.raises(openai.RateLimitError, match="PENSTOCK_FILES_MAX_TENANT_BATCHES"):
        make(api, [row("a", "x")])
    engine.may_go_on.set()
    for one in made:
        ended(api, one)


@pytest.fixture(autouse=True)
def _end(api: openai.OpenAI) -> Iterator[None]:
    yield
    for batch in api.batches.list():
        if batch.status not in ENDED:
            ended(api, api.batches.cancel(batch.id).id)
