"""`penstock pools` shows the load of pools, also of those without living nodes."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any, cast

from fakes.command import run_command
from fakes.processes.reference_engine import ReferenceEngine
from fakes.processes.running_node import running_node
from fakes.queue.harness import LEASE_MS, Queue

from penstock.contract.pool import NodePressure
from penstock.producer.client import AsyncClient
from penstock.queue.broker.connection import connect


def pools(redis_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("pools", *arguments, "--redis-url", redis_url)


async def serve_two_jobs(redis_url: str) -> None:
    redis = connect(redis_url)
    queue = Queue(redis)
    node = await queue.node("n1")
    await queue.running(node)
    await queue.submit()
    told = NodePressure("n1", kv_blocks_total=200, kv_blocks_free=150, decode_tokens_per_s=41.7)
    await node.broker.heartbeat(told, free=10, answered_call=1, held=None)
    await queue.age("nodes", "n1", -3_600_000)  # however long the command takes to start
    await redis.aclose()


async def cancel_all(redis_url: str) -> None:
    redis = connect(redis_url)
    queue = Queue(redis)
    await queue.age("nodes", "n1", 3_600_000 + LEASE_MS)
    for job_id in await queue.ids("open"):
        await queue.producer.cancel(job_id, "default")
    await queue.sweep()
    await redis.aclose()


def test_unused_pool_is_listed_and_can_be_forgotten(redis_url: str) -> None:
    assert pools(redis_url, "list").stdout == ""
    asyncio.run(serve_two_jobs(redis_url))
    (line,) = pools(redis_url, "list").stdout.splitlines()
    assert line.startswith("m  1 node  2 open jobs, 1 of them queued for up to ")
    assert line.endswith(" s  KV cache 25% used  42 tokens/s")
    (shown,) = json.loads(pools(redis_url, "list", "--json").stdout)
    assert (shown["pool"], shown["open_jobs"]) == ("m", 2)
    assert shown["queued_jobs"] == {
        "foreground": {"interactive": 0, "standard": 1, "batch": 0},
        "background": {"interactive": 0, "standard": 0, "batch": 0},
    }
    assert (shown["nodes"][0]["node_id"], shown["nodes"][0]["kv_blocks_free"]) == ("n1", 150)

    refused = pools(redis_url, "forget", "m")
    assert (refused.returncode, refused.stderr) == (2, "penstock: pool m has live nodes: 1\n")
    asyncio.run(cancel_all(redis_url))
    assert pools(redis_url, "list").stdout == "m  0 nodes  0 open jobs, 0 of them queued\n"
    assert pools(redis_url, "forget", "m").returncode == 0
    assert pools(redis_url, "list").stdout == ""
    assert pools(redis_url, "forget", "m").stderr == "penstock: no pool m\n"


def test_a_declared_pool_takes_jobs_before_its_first_node(redis_url: str) -> None:
    words = ("declare", "later", "--model", "acme/later", "--max-model-len", "64", "--redis-url", redis_url)
    declared = run_command("pools", *words, PENSTOCK_NODE_TOOL_PARSER="hermes")
    assert (declared.returncode, declared.stdout) == (0, "later: declared\n")
    assert pools(redis_url, "declare", "later").stdout == "later: exists already, and stays as it is\n"
    (shown,) = json.loads(pools(redis_url, "list", "--json").stdout)
    assert (shown["pool"], shown["open_jobs"], shown["nodes"]) == ("later", 0, [])

    async def submit_and_serve() -> list[str]:
        async with AsyncClient(redis_url) as client:
            jobs = [
                await client.submit("hello", model=name, max_tokens=4, queue_without_node=True)
                for name in ("later", "acme/later")
            ]
            assert sum((await client.pool_stats())[0][0].queue.queued) == 2
            found = (await client.pools())["later"]
            assert (found.max_model_len, found.tool_format.name, found.is_alive) == (64, "hermes", False)
            # Its first node has limits of its own, and joins all the same.
            async with running_node(redis_url, cast(Any, ReferenceEngine()), pool="later", max_wait_ms=5000):
                return [(await job.result()).text for job in jobs]

    assert all(asyncio.run(submit_and_serve()))


def test_a_pool_is_not_declared_under_a_wrong_name(redis_url: str) -> None:
    refused = pools(redis_url, "declare", "not a name")
    assert refused.returncode == 2
    assert "must match the pattern" in refused.stderr
    assert pools(redis_url, "list").stdout == ""
