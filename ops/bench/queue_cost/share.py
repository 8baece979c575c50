"""An engine that wants two cores, bare and behind the queue, in turns."""

from __future__ import annotations

import statistics
import time

from bench.queue_cost.clock import SPOKEN, ClockEngine
from bench.queue_cost.processes import node
from bench.queue_cost.streams import read_streams
from penstock import AsyncClient
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.records import EngineRequest
from penstock.runtime.embedded_redis import EmbeddedRedis

NUM_BUSY = 2
NUM_TURNS = 3


def bare_tokens_per_s(step_ms: float, num_streams: int, num_tokens: int) -> float:
    """Of the engine alone."""
    engine = ClockEngine(step_ms / 1e3, NUM_BUSY)
    started_s = time.perf_counter()
    for i in range(num_streams):
        engine.add(EngineRequest(str(i), [SPOKEN] * 32, SamplingParams(max_tokens=num_tokens), seed=i))
    num_made = 0
    while engine.has_work():
        num_made += len(engine.step())
    return num_made / (time.perf_counter() - started_s)


async def queued_tokens_per_s(server: EmbeddedRedis, step_ms: float, num_streams: int, num_tokens: int) -> float:
    """Of the same engine in a node."""
    with node(server.url, step_ms, NUM_BUSY):
        async with AsyncClient(server.url) as client:
            await read_streams(client, num_streams, 4)
            started_s = time.perf_counter()
            num_read, _lags = await read_streams(client, num_streams, num_tokens)
            return num_read / (time.perf_counter() - started_s)


async def measure_share(server: EmbeddedRedis, step_ms: float, num_streams: int, num_tokens: int) -> None:
    """Prints what is left of the engine's speed."""
    ratios = []
    for _ in range(NUM_TURNS):
        alone = bare_tokens_per_s(step_ms, num_streams, num_tokens)
        queued = await queued_tokens_per_s(server, step_ms, num_streams, num_tokens)
        ratios.append(queued / alone)
        print(f"  busy step {step_ms:g} ms: bare {alone:,.0f}, queued {queued:,.0f} tokens/s: {queued / alone:.1%}")
    print(f"  median {statistics.median(ratios):.1%}")
