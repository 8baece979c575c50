"""The whole path with real parts: client → Redis → node process → Redis → client, with the real small model."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from fakes.processes.node_process import NodeProcess
from fakes.ties import num_departures
from fakes.waiting import until
from redis.asyncio import Redis
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock import AsyncClient
from penstock.contract.job import SamplingParams
from penstock.contract.output import Chunk
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.producer.client import AsyncJob
from penstock.queue.broker.producer import ProducerBroker
from penstock.queue.keys import own_channel

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

NUM_JOBS = 64
NUM_TOKENS = 16
POOL = "demo"
WORDS = ("gate", "opens", "by", "pressure", "turbine", "never", "starves", "nor", "floods", "water", "stands", "high")


def prompts(count: int) -> list[str]:
    rng = random.Random(7)
    return [f"{i}. " + " ".join(rng.choices(WORDS, k=rng.randrange(2, 9))) for i in range(count)]


async def read(job: AsyncJob) -> list[Chunk]:
    return [chunk async for chunk in job.stream()]


async def read_asking(job: AsyncJob) -> tuple[list[Chunk], int]:
    """Return all chunks, and how many chunks the job had when the first one arrived."""
    chunks, num_generated = [], 0
    async for chunk in job.stream():
        if not chunks:
            num_generated = (await job.status()).num_chunks
        chunks.append(chunk)
    return chunks, num_generated


def tokens_of(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def wait_for_idle(broker: ProducerBroker) -> int:
    """Wait until the node's statistics show an idle node with all KV blocks free. Return its number of steps."""

    def is_idle(pressure: Any) -> bool:
        (node,) = pressure.nodes
        return bool(node.num_steps and node.num_jobs == 0 and node.kv_blocks_free == node.kv_blocks_total)

    return int((await until(lambda: broker.pressure(POOL), is_idle)).nodes[0].num_steps)


async def assert_nothing_left(redis: Redis) -> None:
    keys = [key.decode() async for key in redis.scan_iter(match="*")]
    assert [
        k
        for k in keys
        if any(part in k for part in (":queue:", ":requeued:", ":waiting:", ":running:", ":open", ":request:"))
    ] == []
    # Redis notices the closed connection of the client a moment later.
    await until(redis.pubsub_channels, lambda seen: not [c for c in seen if b":doorbell:" not in c], within_s=10)


def departures(folder: Path, texts: Sequence[str], outputs: Sequence[list[int]]) -> int:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return num_departures(model, ((tokenizer(t).input_ids, o) for t, o in zip(texts, outputs, strict=True)))


async def test_64_jobs_at_once_are_batched_and_each_stream_is_its_log(
    redis_url: str, redis: Redis, demo_file: Path
) -> None:
    broker, texts = ProducerBroker(redis), prompts(NUM_JOBS)
    with NodeProcess(redis_url, model=demo_file, pool=POOL):
        async with AsyncClient(redis_url) as client:
            options = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
            jobs = await asyncio.gather(*(client.submit(text, **options) for text in texts))
            batches = asyncio.create_task(_watch_batches(redis, [job.id for job in jobs]))
            streams = await asyncio.gather(*(read_asking(job) for job in jobs))
            running = await batches
            stats = client.stats
            for job, (chunks, num_generated) in zip(jobs, streams, strict=True):
                assert chunks == await broker.log(job.id, 0), "the stream is the log"
                assert chunks[-1].outcome is not None
                assert chunks[-1].outcome.state == "succeeded"
                assert num_generated < len(chunks) - 1, "the first chunk came before the last was generated"
        assert (stats.log_reads, stats.gaps, stats.resubscribes) == (0, 0, 0)
        assert statistics.median(running) >= 16, running
        steps = await wait_for_idle(broker)
        await assert_nothing_left(redis)
    outputs = [tokens_of(chunks) for chunks, _ in streams]
    assert sum(map(len, outputs)) / steps >= 16
    # Their batches differ, but an answer does not depend on its batch. test_correctness.py compares the same model's
    # answers with transformers'.
    engine = Engine(EngineConfig(model=str(demo_file)))
    alone = engine.generate(texts[::8], SamplingParams(**options))
    assert outputs[::8] == [list(one.choices[0].token_ids) for one in alone]


async def _watch_batches(redis: Redis, job_ids: Sequence[str]) -> list[int]:
    """Count the sequences that gained a token while one of them gained two, as long as 16 jobs are unfinished.

    Meanwhile a whole step was published. A shorter time may lie within the publishing of one step.
    """
    broker, seen = ProducerBroker(redis), []
    before = dict.fromkeys(job_ids, 0)
    while True:
        statuses = await asyncio.gather(*(broker.status(job_id, "default") for job_id in job_ids))
        if sum(s.outcome is None for s in statuses) < 16:
            return seen
        gains = [s.num_chunks - before[s.job_id] for s in statuses]
        if max(gains) >= 2:
            seen.append(sum(gain > 0 for gain in gains))
            before = {s.job_id: s.num_chunks for s in statuses}
        await asyncio.sleep(0.05)


async def test_a_plain_subscriber_gets_every_token_of_a_job_with_its_own_channel(
    redis_url: str, redis: Redis, demo_file: Path
) -> None:
    from uuid_utils import uuid7

    with NodeProcess(redis_url, model=demo_file, pool=POOL):
        job_id = f"{POOL}.{uuid7()}"
        async with redis.pubsub() as subscription, AsyncClient(redis_url) as client:
            await subscription.subscribe(own_channel(job_id, "default"))
            job = await client.submit("Once upon a time", job_id=job_id, channel=True, temperature=0, max_tokens=16)
            result = await job.result()
            heard: list[int] = []
            async for message in subscription.listen():
                if message["type"] == "message":
                    chunk = msgpack.unpackb(message["data"])
                    heard += chunk.get("t", [])
                    if "e" in chunk:
                        break
    assert heard == list(result.choices[0].token_ids)
    assert len(heard) > 0


@pytest.mark.slow
async def test_streams_of_a_killed_node_continue_with_the_tokens_of_an_undisturbed_run(
    redis_url: str, demo_folder: Path
) -> None:
    texts = prompts(12)
    common: dict[str, Any] = {
        "model": demo_folder,
        "pool": POOL,
        "dtype": "float32",
        "lease_ms": 3000,
        "max_num_seqs": 12,
    }
    first = NodeProcess(redis_url, **common)
    with first, NodeProcess(redis_url, **common):
        async with AsyncClient(redis_url) as client:
            jobs = [await client.submit(t, temperature=0, max_tokens=60, ignore_eos=True) for t in texts]
            readers = [asyncio.create_task(read(job)) for job in jobs]
            await until(lambda: client.stats.chunks >= 12 * 10)
            first.kill()
            streams = await asyncio.gather(*readers)
            losses = [(await job.status()).losses for job in jobs]
    assert sum(losses) > 0, "the killed node held jobs"
    outputs = [tokens_of(chunks) for chunks in streams]
    assert all(len(output) == 60 for output in outputs)
    assert departures(demo_folder, texts, outputs) <= 1


@pytest.mark.slow
async def test_constrained_streams_of_a_killed_node_continue_with_the_tokens_of_an_undisturbed_run(
    redis_url: str, demo_folder: Path
) -> None:
    texts = prompts(12)
    words = {"type": "array", "items": {"enum": list(WORDS)}, "minItems": 40, "maxItems": 40}
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 400, "structured_outputs": {"json": words}}
    common: dict[str, Any] = {"model": demo_folder, "pool": POOL, "lease_ms": 3000, "max_num_seqs": 12}
    first = NodeProcess(redis_url, **common)
    with first, NodeProcess(redis_url, **common):
        async with AsyncClient(redis_url) as client:
            jobs = [await client.submit(text, seed=i, **options) for i, text in enumerate(texts)]
            readers = [asyncio.create_task(read(job)) for job in jobs]
            await until(lambda: client.stats.chunks >= 12 * 10)
            first.kill()
            streams = await asyncio.gather(*readers)
            losses = [(await job.status()).losses for job in jobs]
    assert sum(losses) > 0, "the killed node held jobs"
    answers = ["".join(chunk.text for chunk in chunks) for chunks in streams]
    assert all(set(said := json.loads(answer)) <= set(WORDS) and len(said) == 40 for answer in answers)
    engine = Engine(EngineConfig(model=str(demo_folder)))
    alone = engine.generate(texts, [SamplingParams(seed=i, **options) for i in range(len(texts))])
    assert [tokens_of(chunks) for chunks in streams] == [list(one.choices[0].token_ids) for one in alone]
