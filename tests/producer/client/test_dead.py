"""Dead letters through the client: retried as new jobs, for the same tenant and with the same options."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from fakes.queue.harness import POOL, Queue, new_job
from redis.asyncio import Redis

from penstock.contract.errors import NotFoundError
from penstock.contract.job import JobDef, Message, Priority, SamplingParams
from penstock.contract.tasks import Tokenize
from penstock.producer.client import AsyncClient
from penstock.queue import keys
from penstock.queue.broker.producer import ProducerBroker
from penstock.queue.wire import decode_request

PROMPTS: list[dict[str, Any]] = [
    {"prompt": "hello"},
    {"prompt_token_ids": (1, 2, 3)},
    {"messages": (Message(role="user", content="hello"),)},
    {"prompt": "hello", "adapter": {"name": "sql", "digest": "0" * 32}},
    {"prompt": "hello", "task": Tokenize(return_token_strs=True), "params": SamplingParams()},
]


async def make_dead_letter(redis: Redis, **fields: Any) -> JobDef:
    """Return a job whose three nodes died, in a pool that has a node again."""
    queue = Queue(redis)
    await queue.node("watcher")
    fields = {"params": SamplingParams(max_tokens=9, seed=5), **fields}
    job = new_job(tenant="acme", priority=Priority.BATCH, **fields)
    await queue.submit(job, weight=4.0)
    for name in ("n0", "n1", "n2"):
        node = await queue.node(name)
        await node.take_one()
        await queue.kill(node)
    await (await queue.node("n3")).heartbeat()
    await queue.age("nodes", "n3", -3_600_000)  # it lives as long as the test, however slow that is
    return job


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_retry_submits_the_same_request_under_a_new_id(
    client: AsyncClient, redis: Redis, prompt: dict[str, Any]
) -> None:
    dead = await make_dead_letter(redis, **prompt)
    before = decode_request(await cast(Any, redis.get(keys.request(dead.id))))

    job = await client.dead.retry(dead.id)

    assert job.id != dead.id
    record = await cast(Any, redis.hgetall(keys.job(job.id)))
    assert [record[name] for name in (b"tenant", b"level", b"weight", b"state")] == [b"acme", b"2", b"4.0", b"queued"]
    assert decode_request(await cast(Any, redis.get(keys.request(job.id)))) == before
    assert await client.dead.newest(POOL) == []
    # A job has one retry, whichever command made it.
    again = await client.control.retry(dead.id, tenant="acme")
    assert (again.job_id, again.state, again.existed) == (job.id, "queued", True)
    with pytest.raises(NotFoundError):
        await client.dead.retry(dead.id)


async def test_interrupted_retry_gives_the_same_job_again(client: AsyncClient, redis: Redis) -> None:
    dead = await make_dead_letter(redis)
    request = await cast(Any, redis.get(keys.request(dead.id)))
    job = await client.dead.retry(dead.id)
    await redis.zadd(keys.dead_letters(POOL), {dead.id: 1})
    await redis.set(keys.request(dead.id), request)
    assert (await client.dead.retry(dead.id)).id == job.id


async def test_readers_are_told_of_the_end(client: AsyncClient, redis: Redis) -> None:
    dead = await make_dead_letter(redis)
    async with asyncio.timeout(60):
        result = await client.result(dead.id, check=False, tenant="acme")
    assert (result.outcome.state, result.outcome.code) == ("dead", "node_lost")
    assert (await ProducerBroker(redis).status(dead.id, "acme")).losses == 3
