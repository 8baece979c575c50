"""Gaps between a stream's events over HTTP, of a real model: `… bench.queue_cost gaps --model FILE`."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from statistics import median, quantiles

from bench.child import Spec
from bench.engines.penstock_queue import serve_model
from bench.queue_cost.processes import CpuMeter, gateway, redis_pid
from bench.queue_cost.streams import open_stream
from penstock.runtime.embedded_redis import EmbeddedRedis

POOL = "gaps"
NUM_TOKENS = {1: 200, 16: 100, 64: 60}
"""Tokens of each stream, by the number of streams."""
PROMPT_TOKENS = 32


def measure_gaps(model: str, options: dict[str, str]) -> None:
    """Print a row of the table for each number of streams."""
    print("| streams | gap ms p50 | p95 | tokens per event | tokens/s | % of a core: node's loop | Redis | gateway |")
    print("|---|---|---|---|---|---|---|---|")
    spec = Spec("gaps", model, options | {"pool": POOL})
    with (
        EmbeddedRedis() as server,
        serve_model(server.url, spec) as node_pid,
        gateway(server.url) as (gateway_pid, said),
    ):
        pids = {"node": node_pid, "redis": redis_pid(server), "gateway": gateway_pid}
        asyncio.run(_read_all(said["url"], 1, 8))
        for num_streams, num_tokens in NUM_TOKENS.items():
            with CpuMeter(pids) as meter:
                times = asyncio.run(_read_all(said["url"], num_streams, num_tokens))
            print(_row(times, num_tokens, meter), flush=True)


async def _read_all(url: str, num_streams: int, num_tokens: int) -> list[list[float]]:
    return await asyncio.gather(*(_read(url, i, num_tokens) for i in range(num_streams)))


async def _read(url: str, seed: int, num_tokens: int) -> list[float]:
    """Return when each event of a stream arrived."""
    prompt = [(37 * i + 11 * seed) % 4000 + 5 for i in range(PROMPT_TOKENS)]
    fields = {"model": POOL, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    reader, writer = await open_stream(url, fields)
    times: list[float] = []
    tail = b""
    while not tail.endswith(b"0\r\n\r\n"):
        data = await reader.read(1 << 16)
        if not data:
            raise RuntimeError(f"the gateway hung up: {tail!r}")
        times += [time.perf_counter()] * data.count(b'"text":"')
        tail = data
    writer.close()
    return times


def _row(times: list[list[float]], num_tokens: int, meter: CpuMeter) -> str:
    # The first gap is left out: it holds the prefill of other streams.
    gaps_ms = [(after - before) * 1e3 for of in times for before, after in pairwise(of[1:])]
    num_all = len(times) * num_tokens
    cells = [f"{median(gaps_ms):.1f}", f"{quantiles(gaps_ms, n=20)[-1]:.1f}", f"{num_all / sum(map(len, times)):.2f}"]
    cells.append(f"{num_all / meter.wall_s:.0f}")
    cells += [f"{meter.spent_us[name] / meter.wall_s / 1e4:.1f}" for name in ("node loop", "redis", "gateway")]
    return f"| {len(times)} | {' | '.join(cells)} |"
