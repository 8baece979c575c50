"""Gateways that hold a batch are stopped and killed: each row of its input is answered once, and counted once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fakes import fake_node
from fakes.fake_node import DEFAULT_TOKENS, MODEL, POOL, PROMPT_TOKENS, FakeNode
from fakes.processes.node_process import NodeProcess
from fakes.processes.python_process import PythonProcess
from fakes.processes.reference_engine import ReferenceEngine, reference_choice, reference_tokens, text_of
from fakes.processes.running_node import running_node
from fakes.queue.older_history import saved, set_back
from fakes.waiting import until
from faults import batches
from faults.tools.backlog_entries import Requests
from faults.tools.batch_kills import Ended, Line, problems_of
from faults.tools.processes import GatewayProcess
from faults.tools.redis_process import free_port
from faults.tools.work import PROMPT
from redis.asyncio import Redis

from penstock.contract.job import SamplingParams
from penstock.contract.output import Choice, Usage
from penstock.contract.tenant import Terms
from penstock.producer.client import AsyncClient
from penstock.producer.files.service import Files
from penstock.producer.files.storage import FilesSettings
from penstock.producer.stored_batches import holder as stored_batches_holder
from penstock.producer.stored_batches.holder import BatchHolder
from penstock.producer.stored_batches.row_client import KEY_TTL_S
from penstock.queue import keys, results
from penstock.queue.broker import history
from penstock.queue.broker.connection import connect
from penstock.queue.files.batch import BatchSpec, new_batch_id
from penstock.queue.files.records_audit import audit_files
from penstock.queue.tenants.key_store import KeyStore
from penstock.runtime.event_loop import cancel_until_done
from tests.producer.batch.conftest import process

NUM_ROWS = 600
TIMEOUT_S = 90.0
F = "penstock:{.files}"
WORKER = (
    *(sys.executable, "-m", "celery", "-A", "penstock.producer.batch.app", "worker", "--pool", "threads"),
    *("--concurrency", "2", "--loglevel", "INFO", "--without-mingle", "--without-gossip"),
)


def rows() -> list[dict[str, Any]]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": DEFAULT_TOKENS}
    return [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(NUM_ROWS)
    ]


async def make(http: httpx.AsyncClient, url: str, num_rows: int = NUM_ROWS) -> str:
    content = "\n".join(map(json.dumps, rows()[:num_rows])).encode()
    form = {"data": {"purpose": "batch"}, "files": {"file": ("rows.jsonl", content)}}
    file = (await http.post(f"{url}/v1/files", **cast(Any, form))).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return str((await http.post(f"{url}/v1/batches", json=body)).json()["id"])


async def fields_of(redis: Any, batch_id: str) -> dict[bytes, bytes]:
    return dict(await redis.hgetall(f"{F}:batch:{batch_id}"))


async def until_done(redis: Any, batch_id: str, num_rows: int, token: int = 1) -> int:
    """Wait until a holder of at least this token runs the batch, and so many rows are committed. Return the token."""
    fields = await until(
        lambda: fields_of(redis, batch_id),
        lambda found: int(found[b"token"]) >= token and int(found[b"completed"]) >= num_rows,
        within_s=TIMEOUT_S,
    )
    return int(fields[b"token"])


def holder_of(gateways: Sequence[GatewayProcess], token: int) -> GatewayProcess:
    """The gateway that logged that it runs the batch under this token."""
    found = [one for one in gateways if f'"token": {token}' in one.log]
    assert len(found) == 1, [one.log for one in gateways]
    return found[0]


async def lines_of(http: httpx.AsyncClient, url: str, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await http.get(f"{url}/v1/files/{file_id}/content")
    return [json.loads(line) for line in content.text.splitlines()]


def parts_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/parts/*/*") if path.is_file()]


async def test_each_row_is_answered_once_whatever_becomes_of_the_holders(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_FILES_URL", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_FILES_BATCH_LEASE_S", "1.5")
    monkeypatch.setattr(fake_node, "SEQUENCES", 32)
    redis = cast(Any, connect(redis_url))
    gateways = [GatewayProcess(redis_url) for _ in range(3)]
    with gateways[0], gateways[1], gateways[2]:
        async with FakeNode(redis_url, step_s=0.02), httpx.AsyncClient(timeout=60) as http, asyncio.timeout(TIMEOUT_S):
            batch_id = await make(http, gateways[0].url)
            token = await until_done(redis, batch_id, 1)
            # The holder sleeps through its lease, wakes when another one goes on, and must change nothing.
            sleeper = holder_of(gateways, token)
            sleeper.signal(signal.SIGSTOP)
            token = await until_done(redis, batch_id, 100, token + 1)
            sleeper.signal(signal.SIGCONT)
            await asyncio.sleep(0.5)
            holder = holder_of(gateways, token)
            holder.kill()
            left = [one for one in gateways if one is not holder]
            while (batch := (await http.get(f"{left[0].url}/v1/batches/{batch_id}")).json())["status"] != "completed":
                await asyncio.sleep(0.1)
            assert int((await fields_of(redis, batch_id))[b"token"]) > token
            assert batch["request_counts"] == {"total": NUM_ROWS, "completed": NUM_ROWS, "failed": 0}
            lines = await lines_of(http, left[0].url, batch["output_file_id"])
            assert sorted(line["custom_id"] for line in lines) == sorted(row["custom_id"] for row in rows())
            assert len({line["response"]["request_id"] for line in lines}) == NUM_ROWS
            # Usage: each row ran once, in the counts of the batch as in those of the tenant.
            assert batch["usage"]["output_tokens"] == NUM_ROWS * DEFAULT_TOKENS
            assert batch["usage"]["input_tokens"] == NUM_ROWS * PROMPT_TOKENS
            assert await num_jobs_used(redis) == NUM_ROWS
            assert await audit_files(redis) == []
    assert parts_in(tmp_path) == []
    await redis.aclose()


async def test_requests_of_a_message_batch_go_on_token_by_token_though_node_and_holder_are_killed(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text equals that of a run without faults, which its job's id determines."""
    monkeypatch.setenv("PENSTOCK_FILES_URL", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_FILES_BATCH_LEASE_S", "1.5")
    num_rows, num_tokens, path = 40, 150, "/v1/messages/batches"
    params = {"model": "durable", "max_tokens": num_tokens, "messages": [{"role": "user", "content": PROMPT}]}
    asked = [{"custom_id": "short", "params": {**params, "max_tokens": 5}}]
    asked += [{"custom_id": f"r{number}", "params": params} for number in range(num_rows - 1)]
    node: dict[str, Any] = {"pool": "durable", "lease_ms": 3000, "stream_interval_ms": 0}
    redis, gateways = cast(Any, connect(redis_url)), [GatewayProcess(redis_url) for _ in range(2)]
    # Requests take longer than the first answer takes to be noticed.
    with gateways[0], gateways[1], NodeProcess(redis_url, step_s=0.05, **node) as mortal:
        async with httpx.AsyncClient(timeout=60) as http, asyncio.timeout(TIMEOUT_S):
            batch = (await http.post(f"{gateways[0].url}{path}", json={"requests": asked})).json()
            token = await until_done(redis, batch["id"], 1)
            mortal.kill()
            holder = holder_of(gateways, token)
            holder.kill()
            url = next(one.url for one in gateways if one is not holder)
            with NodeProcess(redis_url, step_s=0.005, **node):
                while (batch := (await http.get(f"{url}{path}/{batch['id']}")).json())["processing_status"] != "ended":
                    assert batch["request_counts"]["processing"] == num_rows
                    await asyncio.sleep(0.1)
                results = [json.loads(line) for line in (await http.get(batch["results_url"])).text.splitlines()]
                fields, num_jobs = await fields_of(redis, batch["id"]), await num_jobs_used(redis, "durable")
                num_moved = 0
                for one in results:
                    job = (await http.get(f"{url}/v1/jobs/{one['result']['message']['id'][4:]}")).json()
                    num_moved += job["ledger"]["num_past_leases"]
        assert await audit_files(redis) == []
    assert batch["request_counts"]["succeeded"] == num_rows == num_jobs, batch
    assert num_moved > 0, "the node was killed in the middle of some requests"
    assert sorted(one["custom_id"] for one in results) == sorted(str(one["custom_id"]) for one in asked)
    num_output_tokens = 0
    for one in results:
        message = one["result"]["message"]
        sampling = SamplingParams(max_tokens=5 if one["custom_id"] == "short" else num_tokens)
        expected = reference_choice(message["id"].removeprefix("msg_"), sampling, list(PROMPT.encode()))
        assert message["content"][0]["text"] == expected.text
        assert message["usage"]["output_tokens"] == len(expected.token_ids)
        num_output_tokens += len(expected.token_ids)
    assert int(fields[b"output_tokens"]) == num_output_tokens
    assert parts_in(tmp_path) == []
    await redis.aclose()


async def num_jobs_used(redis: Any, pool: str = POOL) -> int:
    """Jobs in the usage of all tenants."""
    used = [name async for name in redis.scan_iter(f"{keys.prefix(pool)}:usage:*")]
    counts = [await redis.hgetall(name) for name in used]
    return sum(int(by) for of_day in counts for name, by in of_day.items() if name.endswith(b":jobs"))


async def test_a_worker_goes_on_when_no_gateway_is_left(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on the terms of a key, until it is revoked. A command that waits outlives the gateway that it asked."""
    monkeypatch.setenv("PENSTOCK_FILES_URL", str(tmp_path / "files"))
    monkeypatch.setenv("PENSTOCK_FILES_BATCH_LEASE_S", "1")
    redis, port, num_rows, log = cast(Any, connect(redis_url)), free_port(), 100, tmp_path / "log"
    store, batch_ids = KeyStore(redis), list[str]()
    made = [await store.add("ann", ["infer"], Terms(jobs_per_minute=60_000)) for _ in range(2)]
    env = os.environ | {"PENSTOCK_URL": f"http://127.0.0.1:{port}/v1", "PENSTOCK_API_KEY": made[0][0]}
    async with FakeNode(redis_url, step_s=0.005), AsyncClient(redis_url) as client, asyncio.timeout(TIMEOUT_S):
        records = client.batches
        with GatewayProcess(redis_url, port=port) as gateway:
            for secret, _ in made:
                async with httpx.AsyncClient(timeout=60, headers={"authorization": f"Bearer {secret}"}) as http:
                    batch_ids.append(await make(http, gateway.url, num_rows))
                await records.pause(batch_ids[-1], "ann", paused=True)
            waiting = PythonProcess("-m", "penstock", "batch", "wait", batch_ids[0], env=env)
            await until_done(redis, batch_ids[1], 0, 1)
            with process(*WORKER, log=log, PENSTOCK_REDIS_URL=redis_url):
                await until(lambda: "this worker takes batches" in log.read_text())
                gateway.kill()
                await records.pause(batch_ids[0], "ann", paused=False)
                assert await ended(client, batch_ids[0])
                await store.revoke(made[1][1].key_id)
                await asyncio.sleep(KEY_TTL_S)
                before = (await records.find(batch_ids[1])).num_completed
                await records.pause(batch_ids[1], "ann", paused=False)
                await until(lambda: records.find(batch_ids[1]), lambda seen: "is revoked" in seen.waiting)
                await records.cancel(batch_ids[1], "ann")
                stopped = await until(lambda: records.find(batch_ids[1]), lambda stopped: stopped.status == "cancelled")
        assert (stopped.num_completed, stopped.num_failed) == (before, num_rows - before)
        with GatewayProcess(redis_url, port=port):
            answer = await asyncio.to_thread(waiting.communicate, timeout=TIMEOUT_S)
        assert (waiting.returncode, answer[0]) == (0, "completed\n"), answer
        done = await records.find(batch_ids[0])
        assert (done.num_completed, done.num_failed) == (num_rows, 0)
        assert "Traceback" not in log.read_text()
        assert await audit_files(redis) == []
    await redis.aclose()


async def make_without_gateway(client: AsyncClient, folder: Path, num_rows: int) -> str:
    """Store an input and make its batch by the services themselves, so that no gateway holds it yet."""
    files = Files(FilesSettings(url=str(folder)), client.files)
    content = "\n".join(map(json.dumps, rows()[:num_rows])).encode()
    async with await files.begin("default", len(content)) as upload:
        await upload.write(content)
        file_id = await upload.save("rows.jsonl", "batch", 86_400_000)
    files.close()
    spec = BatchSpec(file_id, "/v1/chat/completions", "24h")
    return await client.batches.create(new_batch_id(), "default", spec, window_ms=86_400_000, max_open=0)


async def ended(client: AsyncClient, batch_id: str, mortal: GatewayProcess | None = None) -> bool:
    """Wait until the batch has ended, and return true; or until the gateway that may die has died."""
    batch = await until(
        lambda: client.batches.find(batch_id),
        lambda found: found.status == "completed" or (mortal is not None and not mortal.is_running),
        within_s=TIMEOUT_S,
    )
    return bool(batch.status == "completed")


async def test_a_row_whose_result_cannot_be_read_fails_and_its_batch_ends(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode, damaged = results.encode_result, [b"\xc1", encode_choices_of_another_kind()]
    monkeypatch.setattr(results, "encode_result", lambda *given: damaged.pop() if damaged else encode(*given))
    async with FakeNode(redis_url), AsyncClient(redis_url) as client, asyncio.timeout(TIMEOUT_S):
        batch_id = await make_without_gateway(client, tmp_path, 6)
        files = Files(FilesSettings(url=str(tmp_path)), client.files)
        holder = asyncio.create_task(BatchHolder(client, files, client.batches).run())
        await ended(client, batch_id)
        batch = await client.batches.find(batch_id)
        assert (batch.num_completed, batch.num_failed) == (4, 2)
        await cancel_until_done([holder])
        files.close()
    assert codes_in(tmp_path, batch.error_file_id) == ["unreadable_result"] * 2
    assert caplog.text.count("a stored result cannot be read") == 2


async def test_the_process_that_makes_a_batch_runs_it_at_once(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would look for batches only after the time of this test."""
    monkeypatch.setattr(stored_batches_holder, "LOOKS_PER_LEASE", 1 / (2 * TIMEOUT_S))
    async with FakeNode(redis_url), AsyncClient(redis_url) as client, asyncio.timeout(TIMEOUT_S):
        files = Files(FilesSettings(url=str(tmp_path), batch_lease_s=60), client.files)
        holder = asyncio.create_task(BatchHolder(client, files, client.batches).run())
        for _ in range(2):
            await ended(client, await make_without_gateway(client, tmp_path, 3))
        await cancel_until_done([holder])
        files.close()


def codes_in(folder: Path, file_id: str | None) -> list[str]:
    (file,) = folder.glob(f"*/files/{file_id}")
    return [json.loads(line)["error"]["code"] for line in file.read_text().splitlines()]


def encode_choices_of_another_kind() -> bytes:
    """A result that can be decoded, of which no answer can be made."""
    choices = (Choice(0, cast(Any, 5), (1,), "length"),)
    return results.encode_result(choices, Usage(1, 1), [(0, 1, 1)])


async def test_a_known_model_without_a_node_waits_for_one(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_FILES_URL", str(tmp_path))
    async with AsyncClient(redis_url) as client, asyncio.timeout(TIMEOUT_S):
        async with FakeNode(redis_url):
            pass
        batch_id = await make_without_gateway(client, tmp_path, 100)
        with GatewayProcess(redis_url):
            await until(lambda: client.pressure(POOL), lambda seen: seen.num_queued == (0, 0, 0, 0, 0, 64))
            batch = await client.batches.find(batch_id)
            assert (batch.status, batch.num_completed) == ("in_progress", 0)
            async with FakeNode(redis_url):
                await ended(client, batch_id)
            assert (await client.batches.find(batch_id)).num_completed == 100


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["threads", "prefork"])
async def test_a_worker_that_is_stopped_gives_its_batches_back(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    monkeypatch.setenv("PENSTOCK_FILES_URL", str(tmp_path / "files"))
    words, log = [pool if word == "threads" else word for word in WORKER], tmp_path / "log"
    async with FakeNode(redis_url, step_s=0.05), AsyncClient(redis_url) as client, asyncio.timeout(TIMEOUT_S):
        batch_id = await make_without_gateway(client, tmp_path / "files", NUM_ROWS)
        with process(*words, log=log, PENSTOCK_REDIS_URL=redis_url) as worker:
            await until(lambda: client.batches.find(batch_id), lambda seen: seen.num_completed)
            worker.terminate()
            assert await asyncio.to_thread(worker.wait, TIMEOUT_S) == 0
        # Not after a lease only.
        leases, _ = await client.batches.take(5, 5.0, asyncio.get_running_loop().time())
        assert len(leases) == 1
        assert "Traceback" not in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_death_at_each_call_of_the_script_loses_no_row(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A gateway dies at its first call of files.lua, at its second … until it survives its batch."""
    monkeypatch.setenv("PENSTOCK_FILES_URL", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_FILES_BATCH_LEASE_S", "1")
    num_rows, num_deaths = 30, 0
    async with FakeNode(redis_url, step_s=0.01), AsyncClient(redis_url) as client:
        for number in range(1, 60):
            batch_id = await make_without_gateway(client, tmp_path, num_rows)
            async with asyncio.timeout(TIMEOUT_S):
                mortal = GatewayProcess(redis_url, dies=f"{when} files {number} kill")
                try:
                    survives = await ended(client, batch_id, mortal)
                finally:
                    mortal.close()
                num_deaths += not survives
                with GatewayProcess(redis_url) as other:
                    await ended(client, batch_id)
                    async with httpx.AsyncClient(timeout=60) as http:
                        batch = (await http.get(f"{other.url}/v1/batches/{batch_id}")).json()
                        lines = await lines_of(http, other.url, batch["output_file_id"])
            assert sorted(line["custom_id"] for line in lines) == sorted(f"r{i}" for i in range(num_rows)), number
            assert batch["request_counts"] == {"total": num_rows, "completed": num_rows, "failed": 0}, number
            if survives:
                break
        print(when, num_deaths)
        assert num_deaths > 8
        redis = cast(Any, connect(redis_url))
        assert await audit_files(redis) == []
        await redis.aclose()


@pytest.mark.slow
@pytest.mark.parametrize(("words", "found"), [((), []), (("--plant", "lost"), ["1 rows are missing: ['row-1999']"])])
async def test_the_campaign_finds_what_is_planted(words: Sequence[str], found: list[str]) -> None:
    kills = "0" if words else "2"
    given = ["--rows", "2000", "--kills", kills, "--every", "2", "--freeze-s", "11", *words]
    assert await batches.run(batches.parser().parse_args(given)) == found


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["embeddings", "scores"])
async def test_texts_keep_their_bits_while_everything_is_killed(entry: str) -> None:
    given = ["--entry", entry, "--rows", "1500", "--kills", "3", "--every", "1.5", "--freeze-s", "4"]
    assert await batches.run(batches.parser().parse_args(given)) == []


def test_rows_that_are_not_answered_once_are_noticed() -> None:
    requests = Requests("p", 4, max_tokens=2)
    right = text_of(reference_tokens("", SamplingParams(**requests.sampling), requests.prompt(0)))
    lines = [
        Line("row-0", right, 2),
        Line("row-1", "wrong", 2),
        Line("row-2", None),
        Line("row-2", None),
        Line("x", ""),
    ]
    assert problems_of(requests, Ended("completed", {}, lines, 6)) == [
        "1 rows are missing: ['row-3']",
        "1 rows are repeated: ['row-2']",
        "1 rows are strange: ['x']",
        "2 rows are failed: ['row-2', 'row-2']",
        "1 rows are wrong: ['row-1']",
        "the batch counts 6 output tokens, its rows 4",
    ]


SECONDS_LESS_THAN_A_LEASE = 40


@pytest.mark.parametrize("look_s", [0.02, 3600], ids=["noticed", "noticed at the end of the run"])
async def test_a_batch_whose_parts_redis_lost_has_each_row_once(
    redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look_s: float
) -> None:
    monkeypatch.setattr(history, "LOOK_S", look_s)
    monkeypatch.setattr(history, "SETTLE_S", 0.05)
    monkeypatch.setattr(stored_batches_holder, "LOOKS_PER_LEASE", 600)
    num_rows = 60
    engine = cast(Any, ReferenceEngine(step_s=0.01, max_num_seqs=4))
    async with (
        running_node(redis_url, engine, pool=POOL, model=MODEL, drain_s=0.0),
        AsyncClient(redis_url) as client,
        asyncio.timeout(TIMEOUT_S),
    ):
        batch_id = await make_without_gateway(client, tmp_path, num_rows)
        files = Files(FilesSettings(url=str(tmp_path), batch_lease_s=60), client.files)
        holder = asyncio.create_task(BatchHolder(client, files, client.batches).run())
        await until(lambda: client.batches.find(batch_id), lambda seen: seen.num_completed)
        before = await saved(redis)
        completed = (await client.batches.find(batch_id)).num_completed
        await until(lambda: client.batches.find(batch_id), lambda seen: seen.num_completed != completed)
        await set_back(redis, before)
        async with asyncio.timeout(SECONDS_LESS_THAN_A_LEASE):
            await ended(client, batch_id)
        batch = await client.batches.find(batch_id)
        assert (batch.num_completed, batch.num_failed) == (num_rows, 0)
        await cancel_until_done([holder])
        files.close()
    ids = custom_ids_in(tmp_path, batch.output_file_id)
    assert len(ids) == len(set(ids)) == num_rows


def custom_ids_in(folder: Path, file_id: str | None) -> list[str]:
    (file,) = folder.glob(f"*/files/{file_id}")
    return [json.loads(line)["custom_id"] for line in file.read_text().splitlines()]
