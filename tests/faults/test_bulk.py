"""A gateway is killed in the middle of a bulk action: another one finishes it, and its report counts each job once."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import httpx
from fakes.fake_node import POOL, FakeNode
from fakes.waiting import until
from faults.tools.processes import GatewayProcess

from penstock.contract.job import SamplingParams
from penstock.producer.client import AsyncClient
from penstock.queue import keys
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.connection import connect

NUM_JOBS = 400
IN_FLIGHT = 32
TIMEOUT_S = 90.0
"""Far more than a gateway takes, for a busy machine."""


async def submit_all(client: AsyncClient, **options: Any) -> list[str]:
    numbers = iter(range(NUM_JOBS))

    async def some() -> list[str]:
        params = SamplingParams(max_tokens=2)
        made = [await client.submit_unread(f"job {n}", params=params, **options) for n in numbers]
        return [one.job_id for one in made]

    return [job_id for ids in await asyncio.gather(*(some() for _ in range(IN_FLIGHT))) for job_id in ids]


async def report_of(http: httpx.AsyncClient, url: str, bulk_id: str) -> dict[str, Any]:
    return dict((await http.get(f"{url}/v1/jobs/bulk/{bulk_id}")).json())


async def changed_by(redis: Any, bulk_id: str, num_changed: int) -> int:
    """Wait until the action has changed that many jobs."""
    while (found := int(await redis.hget(keys.bulk(POOL, bulk_id), "changed") or 0)) < num_changed:
        await asyncio.sleep(0.002)
    return found


async def test_another_gateway_finishes_the_actions_of_killed_ones(redis_url: str) -> None:
    redis = cast(Any, connect(redis_url))
    with GatewayProcess(redis_url) as other:
        async with (
            FakeNode(redis_url, auto=False),
            AsyncClient(redis_url) as client,
            httpx.AsyncClient(timeout=60) as http,
        ):
            ids = {action: await submit_all(client, tags=[action], not_before_s=600) for action in ("cancel", "retry")}
            assert (await client.control.bulk("cancel", tag="retry")).num_changed == NUM_JOBS
            bulk_ids = list[str]()
            for action in ids:
                with GatewayProcess(redis_url) as one:
                    body = {"action": action, "filter": {"tag": action}}
                    bulk_ids.append((await http.post(f"{one.url}/v1/jobs/bulk", json=body)).json()["id"])
                    async with asyncio.timeout(TIMEOUT_S):
                        assert await changed_by(redis, bulk_ids[-1], NUM_JOBS // 10) < NUM_JOBS
                    one.kill()
                await redis.hset(keys.bulk(POOL, bulk_ids[-1]), "lease_until", 0)  # as if LEASE_MS had passed
                await client.submit_unread("later", tags=[action], not_before_s=600)
            for bulk_id in bulk_ids:
                look = partial(report_of, http, other.url, bulk_id)
                report = await until(look, lambda one: one["state"] != "running", within_s=TIMEOUT_S)
                assert [report[name] for name in ("changed", "already_over", "failed")] == [NUM_JOBS, 0, 0]
            states = await asyncio.gather(*(client.status(job_id) for some in ids.values() for job_id in some))
            assert {status.state for status in states} == {"cancelled"}
            # Those of the retry are open again, as new jobs.
            assert await redis.zcard(f"{keys.prefix(POOL)}:jobs:default") == NUM_JOBS
            assert [found for found in await audit(AdminBroker(redis), POOL) if found.invariant in ("I1", "I5")] == []
    await redis.aclose()
