"""Bursts of jobs to several idle nodes: `python -m bench.studies.bursts shares hangs streams` prints tables.

`shares`: which node gets how many jobs of bursts of 20 and of 7, submitted in one call or one by one, with two or three
equal nodes and with paces of 1 : 3; the engines are clocks. `hangs`: how long a burst waits for a node that hangs
(SIGSTOP). `streams`: 20 streams of the demo model on two nodes with a core each, beside nodes that run 10 at once at
most, which divides such a burst by force; by turns, with different prompts and with a common prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

from redis.asyncio import Redis

from bench.queue_cost.processes import child, node
from penstock import AsyncClient
from penstock.cli.demo_model import demo_model
from penstock.queue import keys
from penstock.queue.broker.connection import connect
from penstock.runtime.embedded_redis import EmbeddedRedis

POOL = "clock"
SIZES = (20, 7)
PACES = ((1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 3.0))
STEP_MS = 10.0
"""Of a node of pace 1."""
NUM_TOKENS = 25
"""Of a node of pace 1. Jobs run for some tenths of a second on each, so that all of a burst run at the same time."""
WARM_TOKENS = 200
"""Output of the first jobs: after so many steps a node tells its pace by its engine's times."""
HEARTBEAT_S = 4.0
"""Within this time the other nodes know it."""


async def _nodes(redis: Redis) -> list[bytes]:
    return sorted(await redis.zrange(keys.nodes(POOL), 0, -1))


async def _seconds_until_taken(redis: Redis, size: int) -> float:
    """Wait until the first node holds so many jobs. Return the seconds until then."""
    began_s, name = time.perf_counter(), (await _nodes(redis))[0].decode()
    async with asyncio.timeout(30):
        while await redis.scard(f"{keys.prefix(POOL)}:running:{name}") < size:  # noqa: ASYNC110  no event tells of it
            await asyncio.sleep(0.002)
    return time.perf_counter() - began_s


async def _burst(client: AsyncClient, redis: Redis, size: int, num_tokens: int, *, at_once: bool) -> list[int]:
    """Run a burst, and return how many jobs of it each node got."""
    prompts = [[5] * 30] * size
    options = {"max_tokens": num_tokens, "background": False, "ignore_eos": True}
    if at_once:
        jobs = await asyncio.gather(*(client.submit(prompt, **options) for prompt in prompts))
    else:
        jobs = [await client.submit(prompt, **options) for prompt in prompts]
    await asyncio.gather(*(job.result() for job in jobs))
    ran = Counter([await redis.hget(keys.job(job.id), "node") for job in jobs])
    return [ran[name] for name in await _nodes(redis)]


@contextmanager
def _clocks(paces: Sequence[float]) -> Iterator[tuple[str, list[int]]]:
    """Start nodes with clock engines. Yield the URL of their Redis, and their process ids."""
    with ExitStack() as stack:
        url = stack.enter_context(EmbeddedRedis()).url
        nodes = [
            stack.enter_context(node(url, STEP_MS / pace, PENSTOCK_NODE_NAME=f"n{number}"))
            for number, pace in enumerate(paces)
        ]
        yield url, [pid for pid, _ in nodes]


async def _warm(client: AsyncClient, redis: Redis, paces: Sequence[float]) -> None:
    await _burst(client, redis, 4 * len(paces), WARM_TOKENS, at_once=True)
    await asyncio.sleep(HEARTBEAT_S)


async def measure_shares(num_bursts: int, paces: Sequence[float]) -> None:
    """Print the rows of some nodes."""
    with _clocks(paces) as (url, _):
        async with AsyncClient(url) as client, connect(url) as redis:
            await _warm(client, redis, paces)
            num_tokens = round(NUM_TOKENS * max(paces))
            for size in SIZES:
                for at_once in (True, False):
                    seen = Counter[float]()
                    for _ in range(num_bursts):
                        held = await _burst(client, redis, size, num_tokens, at_once=at_once)
                        seen[_unevenness(held, paces)] += 1
                    row = ", ".join(f"{off:g}: {count}" for off, count in sorted(seen.items()))
                    how = "one call" if at_once else "one by one"
                    print(
                        f"| {':'.join(f'{pace:g}' for pace in paces)} | {size} | {how} | {max(seen):g} | {row} |",
                        flush=True,
                    )


def _unevenness(held: Sequence[int], paces: Sequence[float]) -> float:
    """Return the difference of equal nodes, or else the largest difference of a node from its share by pace."""
    if len(set(paces)) == 1:
        return max(held) - min(held)
    return max(abs(one - sum(held) * pace / sum(paces)) for one, pace in zip(held, paces, strict=True))


async def measure_hangs(num_bursts: int) -> None:
    """Print how long a burst waits for a node that hangs."""
    waits_ms: list[float] = []
    with _clocks((1.0, 1.0)) as (url, pids):
        async with AsyncClient(url) as client, connect(url) as redis:
            await _warm(client, redis, (1.0, 1.0))
            for _ in range(num_bursts):
                os.kill(pids[1], signal.SIGSTOP)
                options = {"max_tokens": NUM_TOKENS, "background": False, "ignore_eos": True}
                jobs = await asyncio.gather(*(client.submit([5] * 30, **options) for _ in range(20)))
                waits_ms.append(1e3 * await _seconds_until_taken(redis, 20))
                os.kill(pids[1], signal.SIGCONT)
                await asyncio.gather(*(job.result() for job in jobs))
                await asyncio.sleep(1.0)
    print(f"all of 20 taken, ms: median {median(waits_ms):.0f}, longest {max(waits_ms):.0f}, {len(waits_ms)} bursts")


async def _streams(client: AsyncClient, prompts: Sequence[str], num_tokens: int) -> tuple[float, float, float]:
    """Return tokens per second of a burst of streams, and the median and the latest seconds to a first token."""
    began_s = time.perf_counter()

    async def first_s(prompt: str) -> float:
        first = 0.0
        async for _ in client.stream(prompt, max_tokens=num_tokens, ignore_eos=True):
            first = first or time.perf_counter() - began_s
        return first

    firsts = await asyncio.gather(*map(first_s, prompts))
    return len(prompts) * num_tokens / (time.perf_counter() - began_s), median(firsts), max(firsts)


def _prompts(number: int, kind: str) -> list[str]:
    """Return 20 prompts: short and different ones, or with about 1,000 tokens in common."""
    common = f"This is journey number {number}. " + "We walked along the river for a day, and then rested. " * 77
    return [f"{common if kind == 'common' else f'Journey {number}.'} Letter {letter}:" for letter in range(20)]


async def _turn(num_seqs: int, number: int, num_tokens: int) -> dict[str, tuple[float, float, float]]:
    with ExitStack() as stack:
        url = stack.enter_context(EmbeddedRedis()).url
        cores = sorted(os.sched_getaffinity(0))
        for core in cores[:2]:
            os.sched_setaffinity(0, {core})  # a node inherits its core
            env = {"PENSTOCK_NODE_PROGRESS": "json", "PENSTOCK_NODE_MAX_NUM_SEQS": str(num_seqs)}
            env |= {"PENSTOCK_NODE_MAX_WAIT_MS": "3600000"}
            stack.enter_context(child("penstock", "node", str(demo_model()), "--redis-url", url, **env))
        os.sched_setaffinity(0, cores)
        async with AsyncClient(url) as client:
            await _streams(client, _prompts(-1, "short"), 4)
            return {kind: await _streams(client, _prompts(number, kind), num_tokens) for kind in ("short", "common")}


async def measure_streams(num_turns: int, num_tokens: int) -> None:
    """Print each turn, and the medians of the ratios."""
    ratios: dict[str, list[tuple[float, ...]]] = {"short": [], "common": []}
    for number in range(num_turns):
        order = (32, 10) if number % 2 else (10, 32)
        found = {num_seqs: await _turn(num_seqs, number, num_tokens) for num_seqs in order}
        for kind, rows in ratios.items():
            print(json.dumps({"kind": kind, **{str(key): found[key][kind] for key in (32, 10)}}), flush=True)
            rows.append(tuple(own / forced for own, forced in zip(found[32][kind], found[10][kind], strict=True)))
    for kind, rows in ratios.items():
        rate, first, last = (median(values) for values in zip(*rows, strict=True))
        print(f"| {kind} | {rate:.3f} | {first:.3f} | {last:.3f} |")


def main() -> None:
    """Measure what is named."""
    parser = argparse.ArgumentParser(prog="bench.studies.bursts", description=__doc__)
    parser.add_argument("what", nargs="*", default=["shares"])
    parser.add_argument("--bursts", type=int, default=100)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--nodes", type=int, nargs="*", default=range(len(PACES)), help="rows of PACES")
    options = parser.parse_args()
    if "shares" in options.what:
        for row in options.nodes:
            asyncio.run(measure_shares(options.bursts, PACES[row]))
    if "hangs" in options.what:
        asyncio.run(measure_hangs(min(30, options.bursts)))
    if "streams" in options.what:
        asyncio.run(measure_streams(options.turns, options.tokens))


if __name__ == "__main__":
    main()
