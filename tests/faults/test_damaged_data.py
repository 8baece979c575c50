"""Damaged data beside a running node: the other tenants' jobs end at once, and the process stays."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, cast

from fakes.cover import FULL
from fakes.processes.node_process import NodeProcess
from fakes.queue.damage import damage, hows_of, means_what_it_says
from fakes.waiting import Deadline, until
from redis.asyncio import Redis
from uuid_utils import uuid7

from penstock.contract.errors import NotFoundError
from penstock.contract.job import JobDef, SamplingParams
from penstock.contract.output import TERMINAL_STATES
from penstock.queue import keys
from penstock.queue.broker.producer import ProducerBroker, Submission

POOL = "m"
NUM_CASES = 50 if FULL else 12
PATIENCE_S = 5.0
BUSY = 4.0
"""A loaded machine gets so many times as long."""
OF_THE_POOL = ("backlog", "queued", "stored", "reserved", "virtual_clock:1", "reservations", "counts")


async def _submit(broker: ProducerBroker, tenant: str, max_tokens: int) -> str:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    job = JobDef(id=f"{POOL}.{uuid7()}", tenant=tenant, prompt="hello", params=params, needs_reader=False)
    return (await broker.submit(Submission(job, 100))).job_id


async def _state(broker: ProducerBroker, job_id: str, tenant: str) -> str:
    return (await broker.status(job_id, tenant)).state


async def _places(redis: Any, target: str) -> list[tuple[str, bytes, str]]:
    """Return the places of a job's own keys, and of its pool."""
    names = [keys.job(target), keys.request(target), keys.log(target)]
    names += [f"{keys.prefix(POOL)}:{name}" for name in OF_THE_POOL]
    found = list[tuple[str, bytes, str]]()
    for name in names:
        kind = (await redis.type(name)).decode()
        if kind != "none":
            found += [(name, one, kind) for one in (await redis.hkeys(name) if kind == "hash" else (b"",))]
    return found


async def test_other_tenants_jobs_end_beside_damaged_data_and_the_node_stays(redis: Redis, redis_url: str) -> None:
    random, broker, problems = Random(68), ProducerBroker(redis), list[str]()
    doorbells = cast(Any, redis)
    with NodeProcess(redis_url, step_s=0.01, name="stays", pool=POOL, lease_ms=3000) as node:
        before = await until(lambda: doorbells.zrange(keys.nodes(POOL), 0, -1))
        for _ in range(NUM_CASES):
            is_running = random.random() < 0.5
            if not is_running:
                await doorbells.hset(keys.paused(POOL), "pool", 1)
            target = await _submit(broker, "a", 200)
            if is_running:
                await until(partial(_state, broker, target, "a"), lambda state: state != "queued")
            name, inside, kind = random.choice(await _places(doorbells, target))
            how = random.choice([how for how in hows_of(kind) if not means_what_it_says(name, inside, how)])
            await damage(redis, name, inside, kind, how)
            others = {tenant: await _submit(broker, tenant, 3) for tenant in ("b", "c")}
            await doorbells.hdel(keys.paused(POOL), "pool")
            for one in await doorbells.zrange(keys.nodes(POOL), 0, -1):
                await doorbells.publish(keys.doorbell(POOL, one.decode()), "")
            deadline = Deadline(PATIENCE_S * BUSY)
            while [one for one in others.items() if await _state(broker, one[1], one[0]) not in TERMINAL_STATES]:
                await asyncio.sleep(0.01)
                if not deadline.left_s():
                    problems.append(f"{name} {inside!r} {how} {'running' if is_running else 'queued'}")
                    break
            for tenant, job_id in others.items():
                if (state := await _state(broker, job_id, tenant)) != "succeeded":
                    problems.append(f"{name} {inside!r} {how}: {state}")
            with suppress(NotFoundError):
                await broker.cancel(target, "a")
        assert node.is_running
        # A node that had joined again would have another id.
        assert await doorbells.zrange(keys.nodes(POOL), 0, -1) == before
    assert not problems, "\n".join(problems)
