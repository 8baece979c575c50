"""The same kills with real models: a stream must equal that of a run without faults, bit by bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 30}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
HYBRID_KINDS: tuple[dict[str, Any], ...] = (
    *KINDS,
    {"temperature": 0.9, "structured_outputs": {"json_schema": SCHEMA}},
    {"temperature": 1.0, "n": 3, "structured_outputs": {"json_schema": SCHEMA}},
)
"""With a schema, a row's states are in two slots, which are exchanged when its token is chosen."""


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


def start_node(url: str, model: Path, runner: str, pool: str, name: str) -> NodeProcess:
    """Start a node with a model."""
    return NodeProcess(url, model=model, pool=pool, name=name, lease_ms=LEASE_MS, runner=runner, num_kv_blocks=256)


async def run_real_takeovers(
    redis: Redis,
    url: str,
    count: int,
    *,
    seed: int,
    model: Path | None = None,
    kinds: Sequence[dict[str, Any]] = KINDS,
    lanes: int = 1,
    runner: str = "native",
) -> Takeovers:
    """Run until `count` kills have hit a running job of these kinds, in so many pools of two nodes each.

    model: the demo model by default.
    """
    rng, takeovers, path = random.Random(seed), Takeovers(count), model or Path(demo_model())

    async def run_lane(pool: str) -> None:
        async with (
            Lane(redis, url, pool, partial(start_node, url, path, runner, pool)) as lane,
            AsyncClient(url) as client,
        ):
            while takeovers.wanted:
                takeovers.wanted -= 1
                kind = kinds[takeovers.wanted % len(kinds)]
                sizes = {"max_tokens": rng.randint(*MAX_TOKENS), "seed": rng.getrandbits(32)}
                sizes["ignore_eos"] = "structured_outputs" not in kind
                work = await undisturbed(client, kind | sizes, pool)
                takeovers.note(await lane.run(work, rng.randint(1, work.num_expected - 1), work.num_expected))
                work.check()

    async with asyncio.TaskGroup() as group:
        for number in range(lanes):
            group.create_task(run_lane(f"{POOL}{number}"))
    return takeovers
