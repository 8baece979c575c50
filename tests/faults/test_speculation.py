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


async def _have_accepted(redis: Redis) -> bool:
    """Return whether the next two heartbeats of a node say that it has accepted drafts."""
    for _ in range(20):
        if any(record.accepted_tokens for record in await AdminBroker(redis).pressure(POOL)):
            return True
        await asyncio.sleep(0.1)
    return False


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
        hit, has_accepted = None, False
        # A node drafts only while its measured step times say that drafts pay, so one answer may have none.
        while hit is None or not has_accepted:
            work = RealWork({"job_id": f"{POOL}.{uuid7()}", **options}, undisturbed=said)
            hit = await lane.run(work, KILLED_AT, work.num_expected) or hit
            work.check()
            has_accepted = has_accepted or await _have_accepted(redis)
        await check_settled(redis, POOL)
