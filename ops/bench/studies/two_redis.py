"""`PYTHONPATH=ops python -m bench.studies.two_redis`: what callers notice of the death of another pool's Redis.

One gateway serves two pools, one in the directory and one in a Redis of its own. Completions arrive at a fixed rate at
both. Then one Redis is killed, while its callers go on asking, and the times of the other pool's answers are compared.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

import httpx

from bench import machine
from bench.queue_cost.processes import gateway, node, redis_pid
from penstock.runtime.embedded_redis import EmbeddedRedis

RESULTS = Path(__file__).parents[1] / "results"
POOLS = ("first", "second")
"""The first one is in the directory."""
RATE = 20.0
"""Completions a second at each pool."""
MAX_TOKENS = 16
STEP_MS = 2.0
WARM_S, PHASE_S = 2.0, 10.0
RUNS = 5
HEAD = """# Two Redis, one gateway, {date}

`PYTHONPATH=ops python -m bench.studies.two_redis` on {cores} cores of {cpu}. Each pool gets {rate:.0f} completions of
{tokens} tokens a second from one gateway; a node's step takes {step:.0f} ms. Then the Redis of one pool gets a SIGKILL,
while its callers go on asking. Times and failed answers of the other pool, {phase:.0f} s before and behind the kill.
Medians of {runs} runs; other processes took {foreign:.0%} of the machine.

| killed | p50 before / after | p99 before / after | p99 after ÷ before | failed answers |
|---|---|---|---|---|
"""


async def _phase(http: httpx.AsyncClient, answers: set[asyncio.Task[None]], seconds: float) -> dict[str, list[float]]:
    """Ask both pools for so many seconds. Return the times of the answers, of a failed one infinity."""
    times: dict[str, list[float]] = {pool: [] for pool in POOLS}

    async def ask(pool: str) -> None:
        begun_s = time.perf_counter()
        body = {"model": pool, "prompt": "once", "max_tokens": MAX_TOKENS}
        answer = await http.post("/v1/completions", json=body)
        times[pool].append(time.perf_counter() - begun_s if answer.status_code == 200 else float("inf"))

    clock = asyncio.get_running_loop().time
    begun_s = clock()
    for number in range(round(RATE * seconds)):
        await asyncio.sleep(begun_s + number / RATE - clock())
        for pool in POOLS:
            task = asyncio.create_task(ask(pool))
            answers.add(task)
            task.add_done_callback(answers.discard)
    return times


async def _run(url: str, victim: int, living: str) -> tuple[list[float], list[float]]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    answers: set[asyncio.Task[None]] = set()
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        await _phase(http, answers, WARM_S)
        before = await _phase(http, answers, PHASE_S)
        await asyncio.sleep(1.0)
        os.kill(victim, signal.SIGKILL)
        after = await _phase(http, answers, PHASE_S)
        await asyncio.sleep(1.0)
        for task in list(answers):
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
    return before[living], after[living]


def _measured(killed: int) -> tuple[list[float], list[float]]:
    """Return the times of the living pool, before and after the kill."""
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in POOLS]
        servers = [stack.enter_context(EmbeddedRedis(data_dir=folder)) for folder in folders]
        for pool, server in zip(POOLS, servers, strict=True):
            stack.enter_context(node(server.url, STEP_MS, pool=pool))
        setting = f"{POOLS[1]}={servers[1].url}"
        _, said = stack.enter_context(gateway(servers[0].url, PENSTOCK_POOLS=setting))
        return asyncio.run(_run(said["url"], redis_pid(servers[killed]), POOLS[1 - killed]))


def _row(killed: int, runs: Sequence[tuple[list[float], list[float]]]) -> str:
    p50, p99, ratios, num_failed = [], [], [], 0
    for before, after in runs:
        cuts = [quantiles([1000 * one for one in times], n=100) for times in (before, after)]
        p50.append([one[49] for one in cuts])
        p99.append([one[98] for one in cuts])
        ratios.append(cuts[1][98] / cuts[0][98])
        num_failed += sum(one == float("inf") for one in (*before, *after))
    halves = [" / ".join(f"{median(values):.1f} ms" for values in zip(*of, strict=True)) for of in (p50, p99)]
    name = f"the {'directory' if killed == 0 else 'Redis of the second pool'}"
    return f"| {name} | {halves[0]} | {halves[1]} | {median(ratios):.2f} | {num_failed} |"


def main() -> None:
    """Write the results."""
    foreign = machine.ForeignCpu()
    rows = [_row(killed, [_measured(killed) for _ in range(RUNS)]) for killed in (1, 0)]
    share = foreign.share()
    found = {"rate": RATE, "tokens": MAX_TOKENS, "step": STEP_MS, "phase": PHASE_S, "runs": RUNS}
    head = HEAD.format(**machine.describe(), **found, foreign=share)
    text = head + "\n".join(rows) + "\n"
    print(text)
    (RESULTS / "two_redis.md").write_text(text)


if __name__ == "__main__":
    main()
