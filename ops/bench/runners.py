"""One engine, one workload, one process: `python -m bench.runners KIND MODEL DTYPE WORKLOAD` prints one JSON line."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise

from bench.workload import BenchRequest, offline_mix, single_stream

WORKLOADS: dict[str, Callable[[], list[BenchRequest]]] = {"mix": offline_mix, "single": single_stream}
NUM_ONE_BY_ONE = 6
"""Requests of the mix that an engine without batching is timed on; it would need minutes for all."""


@dataclass(frozen=True)
class Measured:
    """What a run gave. Latencies are medians over the requests, in milliseconds."""

    output_tokens: int
    wall_s: float
    ttft_ms: float
    itl_ms: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.wall_s


class _Stopwatch:
    """Arrival times of tokens per request; a first arrival is a TTFT, the gaps behind it are ITLs."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._arrivals: dict[str, list[float]] = {}
        self._tokens = 0

    def saw(self, request: str, num_tokens: int) -> None:
        self._arrivals.setdefault(request, []).append(time.perf_counter())
        self._tokens += num_tokens

    def measured(self) -> Measured:
        wall_s = max(times[-1] for times in self._arrivals.values()) - self._start_s
        first = [times[0] - self._start_s for times in self._arrivals.values()]
        gaps = [b - a for times in self._arrivals.values() for a, b in pairwise(times)]
        return Measured(self._tokens, wall_s, statistics.median(first) * 1e3, statistics.median(gaps) * 1e3)


def run_engine(model: str, dtype: str, requests: list[BenchRequest]) -> Measured:
    """The bare engine, in process."""
    from penstock.contract.job import SamplingParams
    from penstock.gpu_node.engine.config import EngineConfig
    from penstock.gpu_node.engine.engine import Engine

    engine = Engine(EngineConfig(model=model, dtype=dtype))  # type: ignore[arg-type]
    engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
    watch = _Stopwatch()
    for i, r in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=r.num_output, ignore_eos=True)
        engine.add(str(i), r.prompt, params, seed=0)
    while engine.has_work():
        for output in engine.step():
            watch.saw(output.request_id, len(output.token_ids))
    return watch.measured()


def run_queue(model: str, dtype: str, requests: list[BenchRequest]) -> Measured:
    """Client → Redis → node process → Redis → client, all on this machine."""
    from penstock.contract.embedded import EmbeddedRedis

    with EmbeddedRedis() as redis:
        env = os.environ | {
            "PENSTOCK_REDIS_URL": redis.url,
            "PENSTOCK_NODE_MODEL": model,
            "PENSTOCK_NODE_DTYPE": dtype,
            "PENSTOCK_NODE_PROGRESS": "json",
        }
        node = subprocess.Popen(
            [sys.executable, "-m", "penstock.gpu_node"], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            for line in node.stdout or ():
                if json.loads(line)["event"] == "ready":
                    break
            return asyncio.run(_stream_all(redis.url, requests))
        finally:
            node.terminate()
            node.wait(30)


async def _stream_all(url: str, requests: list[BenchRequest]) -> Measured:
    from penstock import AsyncClient

    async with AsyncClient(url) as client:
        async for _ in client.stream([1, 2, 3], temperature=0, max_tokens=4):
            pass
        watch = _Stopwatch()

        async def stream(i: int, r: BenchRequest) -> None:
            async for chunk in client.stream(r.prompt, temperature=0, max_tokens=r.num_output, ignore_eos=True):
                if chunk.token_ids:
                    watch.saw(str(i), len(chunk.token_ids))

        await asyncio.gather(*(stream(i, r) for i, r in enumerate(requests)))
        return watch.measured()


def run_transformers(model: str, dtype: str, requests: list[BenchRequest]) -> Measured:
    """The generate of transformers, one request after the other; of a mix only the first few."""
    import torch
    from transformers import AutoModelForCausalLM

    from penstock.gpu_node.model.source import resolve_model

    folder = resolve_model(model, lambda _stage, _fraction: None)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def generate(prompt: list[int], count: int) -> None:
        ids = torch.tensor([prompt])
        hf.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count, max_new_tokens=count
        )

    generate([1, 2, 3], 4)
    tokens, ttfts, itls, start_s = 0, [], [], time.perf_counter()
    for r in requests[:NUM_ONE_BY_ONE]:
        asked_s = time.perf_counter()
        generate(r.prompt, r.num_output)
        itls.append((time.perf_counter() - asked_s) / r.num_output)
        tokens += r.num_output
    wall_s = time.perf_counter() - start_s
    for r in requests[:NUM_ONE_BY_ONE]:
        asked_s = time.perf_counter()
        generate(r.prompt, 1)
        ttfts.append(time.perf_counter() - asked_s)
    return Measured(tokens, wall_s, statistics.median(ttfts) * 1e3, statistics.median(itls) * 1e3)


RUNNERS = {"engine": run_engine, "queue": run_queue, "transformers": run_transformers}


def main() -> None:
    """One run, as the command line says."""
    kind, model, dtype, workload = sys.argv[1:]
    measured = RUNNERS[kind](model, dtype, WORKLOADS[workload]())
    print(json.dumps(asdict(measured) | {"tokens_per_s": measured.tokens_per_s}))


if __name__ == "__main__":
    main()
