"""Jobs on real nodes with drafting: after a takeover, the tokens equal those of a node without drafting."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fakes.processes.node_process import NodeProcess
from faults.tools.real_takeover import RealWork, undisturbed
from faults.tools.takeover import Lane
from faults.tools.work import check_settled
from fixtures.tiny_model import make_tiny_model
from redis.asyncio import Redis
from uuid_utils import uuid7

from penstock.kernels.cpu.probe import best_isa, cpu_flags
from penstock.producer.client import AsyncClient
from penstock.queue.broker.admin import AdminBroker

POOL = "drafting"
PLAIN_POOL = "plain"
NUM_TOKENS = 1800
KILLED_AT = 300
LIKELY = dict.fromkeys(range(5, 9), 30.0)
"""Of a few tokens some runs come often, and what follows them is neither sure nor rare."""


async def _num_accepted(redis: Redis) -> int:
    return sum(record.accepted_tokens for record in await AdminBroker(redis).pressure(POOL))


@pytest.mark.skipif(best_isa(cpu_flags()) is None, reason="no native kernels on this CPU")
async def test_stream_of_drafting_nodes_continues_token_exact(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    fast = {"runner": "native", "dtype": "bfloat16", "num_threads": 1, "num_kv_blocks": 512}
    options = {"temperature": 0.7, "seed": 7, "n": 4, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    options["logit_bias"] = LIKELY

    def start(name: str) -> NodeProcess:
        return NodeProcess(redis_url, model=model, pool=POOL, name=name, lease_ms=3000, speculative="ngram", **fast)

    with NodeProcess(redis_url, model=model, pool=PLAIN_POOL, name="n", lease_ms=3000, **fast):
        async with AsyncClient(redis_url) as client:
            said = (await undisturbed(client, options, PLAIN_POOL)).undisturbed
    async with Lane(redis, redis_url, POOL, start) as lane:
        hit = None
        while hit is None:
            work = RealWork({"job_id": f"{POOL}.{uuid7()}", **options}, undisturbed=said)
            hit = await lane.run(work, KILLED_AT, work.num_expected)
            work.check()
        while not await _num_accepted(redis):  # the next heartbeat says it
            await asyncio.sleep(0.1)
        await check_settled(redis, POOL)
