"""Kill nodes at random tokens chosen in advance, and check the jobs that they ran.

Each lane is a pool with two nodes. The node that runs the job is killed when the chosen token has reached the reader.
The other node continues the job, while a new node starts for the next round.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, cast

from fakes.processes.node_process import NodeProcess
from faults.tools.work import KINDS, PROMPT, Work, check_logs, check_settled, holder, new_work, statuses
from redis.asyncio import Redis

from penstock.contract.output import Chunk
from penstock.producer.client import AsyncClient, ClientSettings
from penstock.queue import keys

PATIENCE_S = 600.0
WATCH_S = 0.05
MAX_HELD_UP_S = 0.5
StartNode = Callable[[str], NodeProcess]
"""Of the node's name."""


@dataclass(frozen=True)
class Takeover:
    """A kill that hit a running job: the chosen token, the number of tokens, and the time of the next one."""

    work: Work
    drawn: int
    num_tokens: int
    seconds: float
    held_up_s: float
    """For how long, at most, this process itself got no turn meanwhile: its clock then says little of the others."""


class HeldUp:
    """Measures, while the block runs, how late its own timer fires."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            looked_s = time.monotonic()
            await asyncio.sleep(WATCH_S)
            self.longest_s = max(self.longest_s, time.monotonic() - looked_s - WATCH_S)


class Lane:
    """One pool, used as a context: always two nodes."""

    def __init__(self, redis: Redis, url: str, pool: str, start_node: StartNode) -> None:
        self.redis, self.pool = redis, pool
        self._url, self._start_node = url, start_node
        self._nodes: dict[str, NodeProcess] = {}
        self._num_started = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await asyncio.gather(self._start(), self._start())
        settings = ClientSettings(outage_s=PATIENCE_S)
        self._client = await self._stack.enter_async_context(AsyncClient(self._url, settings=settings))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        name = f"n{self._num_started}"
        self._num_started += 1
        node = self._start_node(name)
        self._stack.callback(node.close)
        self._nodes[name] = await asyncio.to_thread(node.wait_ready)

    async def run(self, work: Work, drawn: int, num_tokens: int) -> Takeover | None:
        """Run one job and one kill. Return None if the kill hit no running job."""
        job = await self._client.submit(PROMPT, **work.options)
        async with aclosing(job.chunks()) as chunks:
            while work.num_seen < drawn:
                work.see_chunk(await anext(chunks))
            victim = self._nodes.pop(await holder(self.redis, work.id))
            killed_s = time.monotonic()
            victim.kill()
            num_logged = await cast(Any, self.redis.llen(keys.log(work.id)))
            was_running = (await statuses(self.redis, [work]))[0].state == "running"
            starting = asyncio.create_task(self._start())
            try:
                async with HeldUp() as held_up:
                    first_s = await _read_on(chunks, work, num_logged)
            finally:
                await starting
        (status,) = await statuses(self.redis, [work])
        assert (status.state, status.outcome and status.outcome.code) == ("succeeded", ""), "no job is lost"
        return Takeover(work, drawn, num_tokens, first_s - killed_s, held_up.longest_s) if was_running else None


async def _read_on(chunks: AsyncIterator[Chunk], work: Work, num_logged: int) -> float:
    """Read the rest of a stream. Return the arrival time of the first chunk that was not logged at the kill."""
    first_s = math.inf
    async for chunk in chunks:
        if chunk.index >= num_logged:
            first_s = min(first_s, time.monotonic())
        work.see_chunk(chunk)
    return first_s


@dataclass
class Takeovers:
    """The number of kills to do, and the kills that hit a running job."""

    wanted: int
    hits: list[Takeover] = field(default_factory=list)
    num_missed: int = 0
    num_disturbed: int = 0
    """Rounds in which the machine stood still: their streams count, their times do not, and they are repeated."""

    def note(self, hit: Takeover | None) -> None:
        """Count a round. One whose kill hit no running job is repeated."""
        if hit is None:
            self.num_missed += 1
            self.wanted += 1
        elif hit.held_up_s > MAX_HELD_UP_S:
            self.num_disturbed += 1
            self.wanted += 1
        else:
            self.hits.append(hit)

    async def run_lane(self, lane: Lane, new: Callable[[str, int], Work], rng: random.Random) -> None:
        """Run rounds in one lane until all lanes have enough; `new` makes the job of a round."""
        async with lane:
            while self.wanted:
                self.wanted -= 1
                work = new(lane.pool, self.wanted)
                num_tokens = work.num_expected
                self.note(await lane.run(work, rng.randint(1, num_tokens - 1), num_tokens))
                work.check()
                await check_logs(lane.redis, [work])
        await check_settled(lane.redis, lane.pool)


async def run_takeovers(
    redis: Redis, url: str, count: int, *, lanes: int, lease_ms: int, seed: int, num_tokens: tuple[int, int] = (30, 200)
) -> Takeovers:
    """Run until `count` kills have hit, with the reference engine, in this many pools at once."""
    rng, takeovers = random.Random(seed), Takeovers(count)

    def new(pool: str, number: int) -> Work:
        return new_work(pool, rng.randint(*num_tokens), **KINDS[number % len(KINDS)])

    def start_node(pool: str, name: str) -> NodeProcess:
        return NodeProcess(url, step_s=0.01, pool=pool, name=name, lease_ms=lease_ms)

    async with asyncio.TaskGroup() as group:
        for number in range(lanes):
            pool = f"lane{number}"
            lane = Lane(redis, url, pool, partial(start_node, pool))
            group.create_task(takeovers.run_lane(lane, new, rng))
    return takeovers
