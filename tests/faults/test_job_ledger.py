"""A job over HTTP survives its node, its gateway and its caller, and its ledger names the nodes that ran it."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from typing import Any

import httpx
from fakes.command import run_command
from fakes.processes.node_process import NodeProcess
from fakes.waiting import wait_until
from faults.tools.processes import GatewayProcess
from faults.tools.work import check_settled

from penstock.queue.broker.connection import connect

POOL = "ledger"
LEASE_MS = 3000


def job_when(http: httpx.Client, job_id: str, state: str, *, num_chunks: int = 0) -> dict[str, Any]:
    """Return the job once it has this state and this number of chunks."""
    return wait_until(
        lambda: http.get(f"/v1/jobs/{job_id}").json(),
        lambda job: job["state"] == state and job["num_chunks"] >= num_chunks,
    )


def chunks_of(http: httpx.Client, job_id: str, after: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Return the ids and data of a job's events."""
    with http.stream("GET", f"/v1/jobs/{job_id}/stream{after}") as answer:
        lines = [line for line in answer.iter_lines() if line.startswith(("id: ", "data: "))]
    ids, data = lines[::2], lines[1::2]
    return [
        (event_id.removeprefix("id: "), json.loads(line.removeprefix("data: ")))
        for event_id, line in zip(ids, data, strict=True)
    ]


def test_job_of_a_killed_node_and_gateway_is_moved_and_read_whole(redis_url: str) -> None:
    with ExitStack() as stack:
        settings: dict[str, Any] = {"pool": POOL, "lease_ms": LEASE_MS, "step_s": 0.02}
        nodes = {name: stack.enter_context(NodeProcess(redis_url, name=name, **settings)) for name in ("one", "two")}
        first = stack.enter_context(GatewayProcess(redis_url))
        second = stack.enter_context(GatewayProcess(redis_url))
        with httpx.Client(base_url=first.url, timeout=60) as http:
            body = {"prompt": "x" * 20, "params": {"max_tokens": 120, "seed": 5, "ignore_eos": True}}
            job_id = http.post("/v1/jobs", json=body).json()["id"]
            running = job_when(http, job_id, "running", num_chunks=5)
        before = running["ledger"]["node"]
        nodes[before.rpartition("-")[0]].kill()
        first.kill()

        with httpx.Client(base_url=second.url, timeout=60) as http:
            whole = chunks_of(http, job_id)
            job = job_when(http, job_id, "succeeded")
            assert [chunk["index"] for _, chunk in whole] == list(range(len(whole)))
            assert "".join(chunk.get("text", "") for _, chunk in whole) == job["result"]["choices"][0]["text"]
            assert len(job["result"]["choices"][0]["token_ids"]) == 120
            middle = len(whole) // 2
            assert chunks_of(http, job_id, f"?after={whole[middle][0]}") == whole[middle + 1 :]

        ledger = job["ledger"]
        after = ledger["node"]
        assert before != after
        events = [(event["event"], event.get("node"), event.get("from_node")) for event in ledger["events"]]
        assert events == [
            ("queued", None, None),
            ("taken", before, None),
            ("first_token", None, None),
            ("node_lost", before, None),
            ("moved", after, before),
            ("finished", after, None),
        ]
        times = [event["at_ms"] for event in ledger["events"]]
        assert times == sorted(times)
        assert times[3] - times[1] >= LEASE_MS
        assert (ledger["losses"], ledger["num_past_leases"], ledger["usage"]["completion_tokens"]) == (1, 1, 120)
        shown = run_command("jobs", "show", job_id, "--json", "--redis-url", redis_url)
        assert json.loads(shown.stdout)["ledger"] == ledger
        asyncio.run(check_pool(redis_url))


async def check_pool(redis_url: str) -> None:
    redis = connect(redis_url)
    await check_settled(redis, POOL)
    await redis.aclose()
