"""Damage of each field and key of a pool, in each state of a job: the other tenants' jobs come with the next take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import pytest
from fakes.cover import FULL, each_value
from fakes.queue.damage import damage, hows_of, means_what_it_says
from fakes.queue.harness import LEASE_MS, POOL, P, Queue, new_job
from redis.asyncio import Redis

from penstock.contract.errors import NotFoundError
from penstock.contract.job_actions import JobFilter
from penstock.contract.tenant import Terms
from penstock.queue import keys
from penstock.queue.broker.job_lists import JobLists
from penstock.queue.broker.node import Taken
from penstock.queue.broker.producer import Submission

STATES = ("queued", "running", "delayed", "ended")
POLICIES = ("fair", "fcfs")
A, B, C = "a", "b", "c"
TERMS = Terms(tokens_per_minute=10**6, account="k1")


class DamagedPool:
    """A pool whose tenant `a` has a job in one state. Each tenant has a job that waits, and `b` one that runs on n1."""

    def __init__(self, redis: Redis, state: str, policy: str) -> None:
        self.queue = Queue(redis)
        self.redis = cast(Any, redis)
        self.state, self.policy = state, policy
        self._saved: dict[bytes, bytes] = {}
        self._calls = 0

    async def build(self) -> None:
        """Make the pool, and keep its keys for `restore`."""
        self.n1 = await self.queue.node("n1", policy=self.policy)
        self.n2 = await self.queue.node("n2", policy=self.policy)
        self.running = await self._taken(B)
        self.target = await self._target()
        self.waiting = {tenant: await self._submit(tenant) for tenant in (A, B, C)}
        await self.queue.sweep()
        names = await self.redis.keys("*")
        self._saved = {name: value for name in names if (value := await self.redis.dump(name)) is not None}
        self._calls = self.n2.call

    async def restore(self) -> None:
        """Bring all keys back, as of now."""
        async with self.redis.pipeline(transaction=False) as pipe:
            pipe.flushall()
            for name, value in self._saved.items():
                pipe.restore(name, 0, value)
            await pipe.execute()
        now_ms = await self.queue.now_ms()
        await self.redis.hset(keys.config(POOL), "swept_ms", str(now_ms))
        await self.redis.zadd(keys.nodes(POOL), {"n1": now_ms, "n2": now_ms})

    async def _target(self) -> str:
        if self.state == "running":
            return (await self._taken(A)).job_id
        if self.state == "ended":
            taken = await self._taken(A)
            assert await self.n1.finish(taken, 0, 2, kv_token_ms=10) == "OK"
            return taken.job_id
        if self.state == "queued":
            return await self._submit(A)
        job_id = await self._submit(A, not_before_ms=60_000)
        await self.queue.delay(job_id, await self.queue.now_ms() - 1000)
        return job_id

    async def _taken(self, tenant: str) -> Taken:
        job_id = await self._submit(tenant)
        taken = await self.n1.take_one()
        assert taken.job_id == job_id
        assert await self.n1.emit(taken, 0, 2) == "OK"
        return taken

    async def _submit(self, tenant: str, **fields: Any) -> str:
        self._calls += 1
        fields |= {"tenant": tenant, "tags": ("t1",), "idempotency_key": f"k{self._calls}"}
        job = new_job(deadline_ms=3_600_000, **fields)
        return (await self.queue.producer.submit(Submission(job, 100, terms=TERMS), "reader")).job_id

    async def places(self) -> list[tuple[str, bytes, str]]:
        """Return each key, with each field and member of it, and its type."""
        found = list[tuple[str, bytes, str]]()
        others = [self.running.job_id, self.waiting[B], self.waiting[C]]
        own = re.compile("|".join([rf":[{B}{C}](:|$)", *map(re.escape, others)]))
        for name in sorted(self._saved):
            if own.search(name.decode()):
                continue
            kind = (await self.redis.type(name)).decode()
            inside: Sequence[bytes] = (b"",)
            if kind == "hash":
                inside = await self.redis.hkeys(name)
            elif kind == "zset":
                inside = await self.redis.zrange(name, 0, -1)
            texts = [(one, f":{one.decode(errors='replace')}") for one in inside]
            found += [(name.decode(), one, kind) for one, text in texts if not own.search(text)]
        return found

    async def goes_on(self) -> set[str]:
        """Run a round of each script. Return the tenants whose waiting jobs came with the first take."""
        self.n2.call += 1
        taken = await self.n2.take_again(10**9, tasks=8)
        came = {tenant for tenant, job_id in self.waiting.items() if job_id in {job.job_id for job in taken.jobs}}
        await self.n1.heartbeat([self.running.job_id, self.target])
        await self.n2.heartbeat([])
        await self.queue.run_sweep()
        await self.queue.producer.submit(Submission(new_job(tenant=C), 100, terms=TERMS))
        for tenant in (A, B):
            await JobLists(self.queue.redis).page(JobFilter(tenant))
        with suppress(NotFoundError):
            await self.queue.producer.status(self.target, A)
        await self.queue.producer.status(self.waiting[C], C)
        await self.queue.age("nodes", "n2", 2 * LEASE_MS)
        await self.redis.hset(keys.config(POOL), "swept_ms", str(await self.queue.now_ms() - LEASE_MS // 4))
        await self.queue.run_sweep()
        return came


@pytest.mark.parametrize(("state", "policy"), each_value(STATES, POLICIES))
async def test_other_tenants_jobs_come_with_the_next_take(redis: Redis, state: str, policy: str) -> None:
    pool = DamagedPool(redis, state, policy)
    await pool.build()
    problems = list[str]()
    turn = STATES.index(state) + 4 * POLICIES.index(policy)
    for number, (name, inside, kind) in enumerate(await pool.places()):
        hows = list(hows_of(kind))
        for how in hows if FULL else (hows[(number + turn) % len(hows)],):
            if means_what_it_says(name, inside, how):
                continue
            await pool.restore()
            if not await damage(redis, name, inside, kind, how):
                continue
            case = f"{name.removeprefix(P)} {inside.decode(errors='replace')} {how}"
            try:
                came = await pool.goes_on()
            except Exception as error:
                problems.append(f"{case}: {error!r:.300}")
                continue
            if not {B, C} <= came:
                problems.append(f"{case}: came {sorted(came)}")
    assert not problems, f"{len(problems)}\n" + "\n".join(problems)
