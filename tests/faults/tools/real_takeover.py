"""The same kills with the small real model: a stream must equal that of a run without faults, bit by bit."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

from fakes.processes.node_process import NodeProcess
from faults.tools.takeover import Lane, Takeovers
from faults.tools.work import PROMPT, Work
from redis.asyncio import Redis
from uuid_utils import uuid7

from penstock.cli.demo_model import demo_model
from penstock.contract.output import Choice
from penstock.producer.client import AsyncClient

POOL = "real"
LEASE_MS = 3000
MAX_TOKENS = (40, 160)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "n": 2},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.1},
)


@dataclass
class RealWork(Work):
    """A job whose choices were computed before, without faults."""

    undisturbed: tuple[Choice, ...] = ()

    def expected(self) -> list[Choice]:
        """The choices of the run without faults."""
        return list(self.undisturbed)


async def undisturbed(client: AsyncClient, options: dict[str, Any], pool: str = POOL) -> RealWork:
    """Run the job without a kill. Return it ready to be submitted again with another id."""
    job = await client.submit(PROMPT, job_id=f"{pool}.{uuid7()}", **options)
    result = await job.result()
    return RealWork({"job_id": f"{pool}.{uuid7()}", **options}, undisturbed=result.choices)


def start_node(url: str, name: str) -> NodeProcess:
    """Start a node with the demo model."""
    return NodeProcess(
        url, model=demo_model(), pool=POOL, name=name, lease_ms=LEASE_MS, runner="native", num_kv_blocks=256
    )


async def run_real_takeovers(redis: Redis, url: str, count: int, *, seed: int) -> Takeovers:
    """Run until `count` kills have hit a running job: greedy, sampled, two choices; one pool of two nodes."""
    rng = random.Random(seed)
    takeovers = Takeovers(count)
    async with Lane(redis, url, POOL, partial(start_node, url)) as lane, AsyncClient(url) as client:
        while takeovers.wanted:
            takeovers.wanted -= 1
            kind = KINDS[takeovers.wanted % len(KINDS)]
            sizes = {"max_tokens": rng.randint(*MAX_TOKENS), "ignore_eos": True, "seed": rng.getrandbits(32)}
            work = await undisturbed(client, kind | sizes)
            takeovers.note(await lane.run(work, rng.randint(1, work.num_expected - 1), work.num_expected))
            work.check()
    return takeovers
