"""`penstock profile` of a running node: the command, the table, and the traces that come back."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fakes.command import run_command
from fakes.processes.reference_engine import ReferenceEngine
from fakes.processes.running_node import running_node
from fakes.waiting import until
from redis.asyncio import Redis

from penstock.gpu_node.engine import Engine
from penstock.producer.client import AsyncClient
from penstock.queue import keys
from penstock.queue.broker.profiles import MAX_PIECES, PIECE_BYTES, TRACE, ProfileBroker, ProfileSummary

POOL = "profiled"
PARTS = {"schedule", "prepare", "copies", "forward", "sample", "output"}
MakeEngine = Callable[..., Engine]


def reference_engine(step_s: float = 0.0) -> Any:
    """An engine without a model; as Any, since its tokenizer has fewer members than a real one."""
    return ReferenceEngine(step_s=step_s)


@asynccontextmanager
async def generating(redis_url: str) -> AsyncIterator[None]:
    """Keep a job running."""
    async with AsyncClient(redis_url) as client:

        async def generate() -> None:
            while True:
                await (await client.submit("a b c", max_tokens=100, ignore_eos=True)).result()

        async with asyncio.TaskGroup() as group:
            task = group.create_task(generate())
            yield
            task.cancel()


async def profile(redis_url: str, folder: Path, *arguments: str) -> dict[str, Any]:
    command = ("profile", *arguments, "--seconds", "0.5", "--json", "--output", str(folder), "--redis-url", redis_url)
    done = await asyncio.to_thread(run_command, *command)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


@pytest.mark.parametrize("runner", ["native", "torch"])
async def test_a_profile_has_the_steps_and_torchs_operations(
    redis_url: str, make_engine: MakeEngine, tmp_path: Path, runner: str
) -> None:
    engine = make_engine(runner=runner, dtype="bfloat16" if runner == "native" else "float32")
    async with running_node(redis_url, engine, pool=POOL, name="one") as node, generating(redis_url):
        summary = await profile(redis_url, tmp_path, "one-")
    assert summary["node_id"] == node.node_id
    assert summary["steps"] > 10
    assert summary["decode_tokens"] > 10
    assert summary["part_seconds"].keys() == PARTS
    assert 0 < summary["part_seconds"]["forward"] < summary["seconds"] + 0.1
    events = events_of(tmp_path / "trace.json.gz")
    steps = [event for event in events if event["name"] == "step"]
    assert len(steps) > 10
    assert {event["name"] for event in events} >= {"forward", "sample", "EngineWorker._run"}
    assert all(first["ts"] <= second["ts"] for first, second in pairwise(steps))
    operations = tmp_path / "operations.json.gz"
    assert operations.exists() == (runner == "torch")
    if runner == "torch":
        assert any(str(event.get("name")).startswith("aten::") for event in events_of(operations))


async def test_a_node_is_profiled_twice_and_keeps_serving(redis_url: str, redis: Redis, tmp_path: Path) -> None:
    async with running_node(redis_url, reference_engine(step_s=0.001), pool=POOL):
        for _ in range(2):
            await profile(redis_url, tmp_path)
        async with AsyncClient(redis_url) as client:
            assert (await (await client.submit("still here", max_tokens=5)).result()).outcome.state == "succeeded"
    assert [key async for key in redis.scan_iter("*:profile:*")] == []


async def test_the_node_must_be_named_if_there_are_several(redis_url: str, tmp_path: Path) -> None:
    async with (
        running_node(redis_url, reference_engine(), pool=POOL, name="one") as one,
        running_node(redis_url, reference_engine(), pool=POOL, name="two") as two,
    ):
        several = await asyncio.to_thread(run_command, "profile", "--redis-url", redis_url)
        unknown = await asyncio.to_thread(run_command, "profile", "three", "--redis-url", redis_url)
    assert several.returncode != 0
    assert one.node_id in several.stderr and two.node_id in several.stderr
    assert "no live node has an id that begins with 'three'" in unknown.stderr


async def test_a_ring_without_a_request_starts_nothing(
    redis_url: str, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_node(redis_url, reference_engine(), pool=POOL) as node, AsyncClient(redis_url) as client:
        await redis.publish(keys.doorbell(POOL, node.node_id), "profile")
        await (await client.submit("hello", max_tokens=5)).result()
    messages = [record.getMessage() for record in caplog.records]
    assert "job.ended" in messages
    assert not any(message.startswith("profile.") for message in messages)


async def test_a_large_answer_takes_little_of_redis_at_a_time(redis: Redis) -> None:
    broker, file = ProfileBroker(redis), bytes(range(256)) * (20 * PIECE_BYTES // 256)
    request = await broker.ask(POOL, "node", 0.1)
    assert await broker.request("node") == request
    assert await broker.request("node") is None
    summary = ProfileSummary("node", files={TRACE: len(file)})
    sending = asyncio.create_task(broker.send(POOL, request, summary, [file]))
    await until(lambda: redis.llen(keys.profile(POOL, request.id)), lambda seen: seen >= MAX_PIECES)
    await asyncio.sleep(0.2)
    assert await redis.llen(keys.profile(POOL, request.id)) == MAX_PIECES
    answered, files = await broker.answer(POOL, request)
    await sending
    assert answered == summary
    assert files == {TRACE: file}
    assert await redis.exists(keys.profile(POOL, request.id)) == 0
