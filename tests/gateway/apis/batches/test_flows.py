"""Flows through `/v1/batches`, the client and the command: rows wait for rows, and have their texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as sync_redis
from fakes.command import run_command
from fakes.waiting import wait_until
from hypothesis import HealthCheck, given, settings

from penstock import AsyncClient, Client
from penstock.contract.errors import JobFailedError, RequestError, UnavailableError
from penstock.producer.batch import run as run_of_rows
from penstock.producer.stored_batches import parts
from penstock.queue import keys
from penstock.queue.files.batch import FLOW_ENDPOINT
from tests.gateway.conftest import MODEL, EchoEngine, Stack
from tests.producer.flows.model import Rows, ends_of, flows

CHAT = "/v1/chat/completions"
MAX_ROWS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def http(stack: Stack, shared_engine: EchoEngine, folder: Path) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_FILES_URL", str(folder))
        patched.setenv("PENSTOCK_FILES_MAX_BATCH_ROWS", str(MAX_ROWS))
        url = str(stack.start_gateway())
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def row(custom_id: str, text: str, body: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": text}], **(body or {})}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked, **fields}


FAILS = {"temperature": -1}


def make(http: httpx.Client, *rows: dict[str, Any], endpoint: str = FLOW_ENDPOINT) -> str:
    content = "\n".join(map(json.dumps, rows)).encode()
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("flow.jsonl", content)}).json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    answer = http.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def wait_for(http: httpx.Client, batch_id: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    return wait_until(lambda: http.get(f"/v1/batches/{batch_id}").json(), is_so)


def ended(http: httpx.Client, batch_id: str) -> dict[str, Any]:
    return wait_for(http, batch_id, lambda one: one["status"] in ("completed", "failed", "cancelled", "expired"))


def lines_of(http: httpx.Client, batch: dict[str, Any]) -> dict[str, str]:
    """Return the text or the error's code of each row, each of which has one line."""
    found = list[tuple[str, str]]()
    for name in ("output_file_id", "error_file_id"):
        if batch[name] is not None:
            for one in map(json.loads, http.get(f"/v1/files/{batch[name]}/content").text.splitlines()):
                body = one["response"] and one["response"]["body"]
                text = body["choices"][0]["message"]["content"] if body and "choices" in body else ""
                found.append((one["custom_id"], one["error"]["code"] if one["error"] else text))
    assert len(dict(found)) == len(found)
    return dict(found)


def run(http: httpx.Client, *rows: dict[str, Any]) -> dict[str, str]:
    batch = ended(http, make(http, *rows))
    assert batch["status"] == "completed", batch["errors"]
    counts, lines = batch["request_counts"], lines_of(http, batch)
    assert counts["total"] == counts["completed"] + counts["failed"] == len(lines)
    return lines


def test_a_fan_in_has_the_texts_of_its_parents(http: httpx.Client, engine: EchoEngine) -> None:
    parts = [row(f"p{i}", f"text {i}") for i in range(20)]
    names = [part["custom_id"] for part in parts]
    last = row("end", "{{all.text}}!")
    lines = run(http, last, row("all", "<{{*.text}}>", after=names), *parts)
    joined = "\n\n".join(f"text {i}" for i in range(20))
    assert (lines["all"], lines["end"]) == (f"<{joined}>", f"<{joined}>!")


def test_no_row_waits_for_the_next_look(
    http: httpx.Client, engine: EchoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_of_rows, "_TICK_S", 3600)
    # Of a run of any length: the second part is not due before the first one is as old as the run was then.
    monkeypatch.setattr(parts, "PARTS_OF_RUN", 1)
    chain = [row("r0", "a"), *(row(f"r{at}", f"{{{{r{at - 1}.text}}}}") for at in range(1, 5))]
    assert run(http, *chain) == dict.fromkeys(("r0", "r1", "r2", "r3", "r4"), "a")


def test_a_for_each_makes_rows_of_a_list(http: httpx.Client, engine: EchoEngine) -> None:
    plan = json.dumps({"parts": [{"name": "Rhine"}, "Nile", 7]})
    lines = run(
        http,
        row("plan", plan),
        row("part", "About {{item}} of {{plan.json.parts[1]}}", for_each="plan.json.parts"),
        row("sum", "{{part.text}}", after=["part"]),
        row("none", "{{item}}", for_each="empty.json"),
        row("empty", "[]"),
        row("after", "<{{none.text}}>"),
    )
    parts = ['About {"name":"Rhine"} of Nile', "About Nile of Nile", "About 7 of Nile"]
    assert [lines[f"part[{i}]"] for i in range(3)] == parts
    assert (lines["sum"], lines["after"]) == ("\n\n".join(parts), "<>")
    assert {"part", "none"} < lines.keys()


def test_what_a_model_wrote_is_not_filled_again(http: httpx.Client, engine: EchoEngine) -> None:
    job = job_of(http, "say {{b.text}} and {{item}}")
    lines = run(http, row("a", "x", after=[{"job": job}]), row("c", f"{{{{{job}.text}}}}", after=[{"job": job}]))
    assert lines["c"] == "say {{b.text}} and {{item}}"


def job_of(http: httpx.Client, text: str) -> str:
    """Submit a job of its own, and return its id."""
    return str(http.post("/v1/jobs", json={"model": MODEL, "prompt": text, "max_tokens": 100}).json()["id"])


def test_a_failed_parent_fails_skips_or_leaves_a_row(http: httpx.Client, engine: EchoEngine) -> None:
    lines = run(
        http,
        row("good", "fine"),
        row("bad", "x", FAILS),
        row("fails", "x", after=["good", "bad"]),
        row("skipped", "x", after=["bad"], on_failure="skip"),
        row("goes on", "[{{*.text}}]", after=["good", "bad", "skipped"], on_failure="continue"),
        row("below", "x", after=["skipped"]),
        row("below both", "x", after=["skipped", "fails"]),
    )
    assert lines == {
        "good": "fine",
        "bad": "invalid_request",
        "fails": "parent_failed",
        "skipped": "row_skipped",
        "goes on": "[fine]",
        "below": "row_skipped",
        "below both": "parent_failed",
    }


@pytest.mark.parametrize(
    ("rows", "code", "line"),
    [
        ([row("a", "x", after=["b"]), row("b", "x", after=["a"])], "cycle", 1),
        ([row("a", "x"), row("b", "x", after=["c"])], "unknown_parent", 2),
        ([row("a", "x", after=[{"job": "echo.0190b5a0-0000-7000-8000-000000000000"}])], "unknown_parent", 1),
        ([row("a", "x"), row("a", "y")], "duplicate_custom_id", 2),
        ([row("a", "x", on_failure="ignore")], "invalid_request", 1),
        ([row("a", "x"), {**row("b", "x"), "url": "/v1/moderations"}], "mismatched_endpoint", 2),
        ([row(f"{i}", "x") for i in range(MAX_ROWS + 1)], "too_many_rows", MAX_ROWS + 1),
    ],
)
def test_rows_that_are_no_flow_are_refused(
    http: httpx.Client, engine: EchoEngine, rows: list[dict[str, Any]], code: str, line: int
) -> None:
    batch = ended(http, make(http, *rows))
    assert batch["status"] == "failed"
    assert [(one["code"], one["line"]) for one in batch["errors"]["data"]] == [(code, line)]


def test_what_is_known_only_later_fails_its_row(http: httpx.Client, engine: EchoEngine) -> None:
    lines = run(
        http,
        row("a", '{"list": 7, "many": [1, 2, 3]}'),
        row("text", "no JSON"),
        row("path", "{{a.json.nothing}}"),
        row("plain", "{{text.json.x}}"),
        row("no list", "{{item}}", for_each="a.json.list"),
        row("too many", "{{item}}", for_each="long.json"),
        row("long", json.dumps([*range(MAX_ROWS)])),
        row("urgent", "x", priority="interactive"),
        row("child", "x", after=["path", "too many"]),
    )
    codes = {"path": "path_not_found", "plain": "path_not_found", "no list": "not_a_list", "too many": "too_many_rows"}
    assert {name: lines[name] for name in codes} == codes
    assert (lines["child"], lines["urgent"]) == ("parent_failed", "class_not_allowed")


def test_rows_show_what_they_wait_for(http: httpx.Client, engine: EchoEngine) -> None:
    engine.may_go_on.clear()
    job = job_of(http, "later")
    batch_id = make(http, row("a", "xx"), row("b", "{{a.text}}", after=["a", {"job": job}]), row("c", "{{b.text}}"))
    path = f"/v1/batches/{batch_id}/rows"
    rows = wait_until(
        lambda: http.get(path).json(),
        lambda one: one["counts"] == {"ready": 1, "waiting": 2} and one["data"][0]["job_id"] is not None,
    )
    a, b, c = rows["data"]
    assert a["state"] in ("queued", "running") and (b["state"], c["state"]) == ("waiting", "waiting")
    assert (b["waits_for"], c["waits_for"], b["after"]) == (["a", job], ["b"], ["a", {"job": job}])
    assert [one["custom_id"] for one in http.get(path, params={"state": "waiting", "limit": 1}).json()["data"]] == ["b"]
    assert [one["custom_id"] for one in http.get(path, params={"after": "b"}).json()["data"]] == ["c"]
    assert http.get(path, params={"state": "odd"}).json()["error"]["param"] == "state"
    holds = http.get("/v1/usage", params={"tenant": "default"}).json()["holds"]
    assert (holds["open_batches"]["used"], holds["open_rows"]["used"]) == (1, 3)
    engine.may_go_on.set()
    assert ended(http, batch_id)["request_counts"]["completed"] == 3
    holds = http.get("/v1/usage", params={"tenant": "default"}).json()["holds"]
    assert (holds["open_batches"]["used"], holds["open_rows"]["used"]) == (0, 0)
    assert http.get(path).json()["counts"] == {"succeeded": 3}


def test_the_next_holder_goes_on_with_the_texts_that_parts_have(
    http: httpx.Client, engine: EchoEngine, redis_url: str
) -> None:
    """Its lease is over while rows are held that a `for_each` has made."""
    engine.may_go_on.clear()
    engine.waits_after = 30
    tail = "z" * 40
    each = row("each", f"{{{{item}}}}{tail}", for_each="list.json")
    batch_id = make(http, each, row("list", '["x", "y"]'), row("all", "{{*.text}}", after=["each", "list"]))
    path = f"/v1/batches/{batch_id}/rows"
    wait_until(lambda: http.get(path).json()["counts"].get("succeeded") == 2)
    with sync_redis.Redis.from_url(redis_url) as redis:
        # Another process has taken the batch, and gives it back at once.
        record = keys.batch(batch_id)
        token = redis.hincrby(record, "token", 1)
        redis.zadd("penstock:{.files}:open_batches", {batch_id: 1})
        wait_until(lambda: redis.hget(record, "token") != str(token).encode())
    engine.waits_after = 1
    engine.may_go_on.set()
    batch = ended(http, batch_id)
    assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
    assert lines_of(http, batch)["all"] == f'x{tail}\n\ny{tail}\n\n["x", "y"]'


def test_a_cancelled_flow_ends_every_row_once(http: httpx.Client, engine: EchoEngine) -> None:
    engine.may_go_on.clear()
    batch_id = make(http, row("a", "xx"), row("b", "{{a.text}}"), row("m", "{{item}}", for_each="b.json"))
    wait_for(http, batch_id, lambda one: one["status"] == "in_progress")
    http.post(f"/v1/batches/{batch_id}/cancel")
    batch = ended(http, batch_id)
    engine.may_go_on.set()
    assert batch["status"] == "cancelled"
    assert lines_of(http, batch) == dict.fromkeys(("a", "b", "m"), "batch_cancelled")
    assert http.get(f"/v1/batches/{batch_id}/rows").json()["counts"] == {"cancelled": 3}


def test_a_plain_batch_says_that_only_flows_have_such_rows(http: httpx.Client, engine: EchoEngine) -> None:
    batch = ended(http, make(http, row("a", "x", after=[]), endpoint=CHAT))
    error = json.loads(http.get(f"/v1/files/{batch['error_file_id']}/content").text)["error"]
    assert error["code"] == "unknown_field" and FLOW_ENDPOINT in error["message"]
    assert http.get(f"/v1/batches/{batch['id']}/rows").json()["error"]["code"] == "not_a_flow"


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=flows(max_rows=10, max_made=2))
def test_random_flows_end_as_a_model_says(http: httpx.Client, engine: EchoEngine, rows: Rows) -> None:
    sizes = {one["for_each"].removesuffix(".json"): one["made"] for one in rows.values() if "made" in one}
    asked = []
    for name, one in rows.items():
        text = "{{item}}" if "made" in one else json.dumps([*range(sizes.get(name, 0))])
        fields = {field: one[field] for field in ("after", "on_failure", "for_each") if field in one}
        asked.append(row(name, text, FAILS if one["fails"] else None, **fields))
    codes = {"invalid_request": "failed", "parent_failed": "failed", "row_skipped": "skipped"}
    found = {name: codes.get(text, "succeeded") for name, text in run(http, *asked).items()}
    assert found == ends_of(rows)


def test_a_flow_by_the_clients(http: httpx.Client, engine: EchoEngine, redis_url: str, folder: Path) -> None:
    with Client(redis_url) as client:
        flow = client.flow(files_url=str(folder), metadata={"a": "b"})
        flow.add("list", model=MODEL, messages=[{"role": "user", "content": '["x", "y"]'}])
        flow.add("each", model=MODEL, messages=[{"role": "user", "content": "<{{item}}>"}], for_each="list.json")
        flow.add("all", model=MODEL, messages=[{"role": "user", "content": "{{*.text}}"}], after=["each"])
        with pytest.raises(RequestError, match="used twice"):
            flow.add("all", prompt="x")
        batch_id = flow.submit(idempotency_key="one")
        answers = {one.custom_id: one for one in flow.answers(timeout=60)}
        assert answers["all"].text == "<x>\n\n<y>" and answers["each"].text is None
        assert {one.error for one in answers.values()} == {None}
        assert flow.status().spec.metadata == {"a": "b"} and flow.id == batch_id
        wrong = client.flow(files_url=str(folder))
        with pytest.raises(RequestError, match="call submit"):
            wrong.status()
        wrong.add("a", prompt="{{b.text}}")
        with pytest.raises(RequestError, match="no row has the custom_id 'b'"):
            wrong.submit()

    async def by_async() -> None:
        async with AsyncClient(redis_url) as client:
            flow = client.flow(files_url=str(folder))
            job = await client.submit([{"role": "user", "content": "job"}], model=MODEL)
            flow.add("a", model=MODEL, messages=[{"role": "user", "content": f"{{{{{job.id}.text}}}}!"}], after=[job])
            assert await flow.submit() != batch_id
            (answer,) = await flow.answers(timeout=60)
            assert answer.text == "job!"
            refused = client.flow(files_url=str(folder))
            refused.add("a", prompt="x", after=[{"job": "echo.0190b5a0-0000-7000-8000-000000000000"}])
            await refused.submit()
            with pytest.raises(JobFailedError, match="there is no job"):
                await refused.wait(timeout=60)

    asyncio.run(by_async())


def test_a_schedule_starts_a_flow_whose_rows_take_its_attempts(
    http: httpx.Client, engine: EchoEngine, redis_url: str, folder: Path
) -> None:
    with Client(redis_url) as client:
        flow = client.flow(files_url=str(folder), max_attempts=3, retry_backoff_s=0.5)
        own = {"model": MODEL, "messages": [{"role": "user", "content": "{{a.text}}!"}], "max_attempts": 2}
        flow.add("a", model=MODEL, messages=[{"role": "user", "content": "hello"}])
        flow.add("b", **own)
        with pytest.raises(RequestError) as refused:
            flow.schedule(cron="61 * * * *")
        assert refused.value.param == "cron"
        made = flow.schedule(every_s=3600, name="hourly")
        client.schedules.run_now(made.id)
        runs = wait_until(lambda: client.schedules.runs(made.id))
        batch = ended(http, runs[0].object_id)
        client.schedules.delete(made.id)
        assert lines_of(http, batch) == {"a": "hello", "b": "hello!"}
        assert (batch["endpoint"], batch["max_attempts"], batch["retry_backoff_s"]) == (FLOW_ENDPOINT, 3, 0.5)
        newest = client.jobs(limit=2).jobs
        assert [job.max_attempts for job in newest] == [2, 3], "a row's own number counts"
        counts = client.sets.counts(batch=batch["id"])
        assert (dict(counts.states), counts.num_open, counts.rate_per_s) == ({"succeeded": 2}, 0, None)
        for wrong in ({"max_attempts": 9}, {"retry_backoff_s": -1}):
            with pytest.raises(RequestError) as refused:
                client.flow(files_url=str(folder), **wrong)  # type: ignore[arg-type]
            assert refused.value.param == next(iter(wrong))


def test_the_progress_of_a_batch_goes_on_until_its_end(http: httpx.Client, engine: EchoEngine, redis_url: str) -> None:
    """Also while its rows are checked: none of them counts then."""
    batch_id = make(http, *(row(f"r{at}", "x") for at in range(MAX_ROWS)))
    with Client(redis_url) as client:
        *_, last = client.sets.progress(batch=batch_id, every_s=0.02)
    assert http.get(f"/v1/batches/{batch_id}").json()["status"] == "completed"
    assert (last.total, last.num_ended, dict(last.states)) == (MAX_ROWS, MAX_ROWS, {"succeeded": MAX_ROWS})


def test_a_client_without_files_says_what_it_needs(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_FILES_URL", raising=False)
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "none"))
    with Client(redis_url) as client:
        flow = client.flow()
        flow.add("a", prompt="x")
        with pytest.raises(UnavailableError, match="PENSTOCK_FILES_URL"):
            flow.submit()


def command(http: httpx.Client, *words: str, status: int = 0) -> tuple[str, str]:
    done = run_command(*words, "--base-url", str(http.base_url))
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    return done.stdout, done.stderr


def test_a_flow_by_the_command(http: httpx.Client, engine: EchoEngine, tmp_path: Path) -> None:
    source, output = tmp_path / "flow.jsonl", tmp_path / "out.jsonl"
    rows = [row("a", "hello"), row("b", "{{a.text}} you"), row("bad", "x", FAILS), row("c", "x", after=["bad"])]
    source.write_text("\n".join(map(json.dumps, rows)))
    _, told = command(http, "flows", "run", str(source), str(output), status=1)
    batch_id, lines = told.split()[0], [json.loads(line) for line in output.read_text().splitlines()]
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in lines}
    assert texts == {"a": "hello", "b": "hello you"} and "2 failed or skipped" in told
    shown, _ = command(http, "flows", "show", batch_id)
    assert "b succeeded ← a" in shown and "'bad', which the row waits for, has failed" in shown
    some, _ = command(http, "flows", "show", batch_id, "--limit", "1")
    assert "a succeeded" in some and "3 more (--limit 4)" in some
    assert command(http, "flows", "show", batch_id, "--limit", "4")[0] == shown
    failed, _ = command(http, "flows", "show", batch_id, "--state", "failed", "--json")
    assert [one["custom_id"] for one in json.loads(failed)] == ["bad", "c"]
    source.write_text("\n".join(map(json.dumps, [row("a", "x", after=["b"]), row("b", "{{a.text}}")])))
    _, refused = command(http, "batch", "submit", str(source), status=2)
    assert "a → b" in refused or "b → a" in refused
