"""`penstock pools` shows the load of pools, also of those without living nodes."""

from __future__ import annotations

import asyncio
import json
import subprocess

from fakes.command import run_command
from fakes.queue.harness import LEASE_MS, Queue

from penstock.contract.pool import NodePressure
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
