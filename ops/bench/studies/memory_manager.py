"""Measure what the KV cache wastes, moves and saves; `python -m bench.studies.memory_manager` writes the results."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from bench.machine import describe, revision
from bench.studies.block_waste import Load, block_waste
from bench.workload import offline_mix
from penstock.cli.demo_model import demo_model
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.model.protocol import NO_ROWS, StepPlan

RESULTS = Path(__file__).parents[1] / "results"
COMMAND = "PYTHONPATH=ops PYTHONSAFEPATH=1 .venv/bin/python -m bench.studies.memory_manager"
BLOCK_SIZE = 16
FIXED_TOKENS = 2048
REPEATS = 15
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def main() -> None:
    """Measures on the demo model in bfloat16."""
    machine = describe()
    lines = [
        "# KV memory",
        "",
        f"SmolLM2-135M in bfloat16, blocks of {BLOCK_SIZE} tokens, {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['date']}, {revision()}. `{COMMAND}`",
    ]
    for part in (_waste, _live_waste, _block_sizes, _copies, _tiers, _shared_prefix, _layouts):
        lines += ["", *part()]
    (RESULTS / "memory_manager.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _engine(**settings: Any) -> Engine:
    plain = {"runner": "native", "quantization": "none", "num_kv_blocks": 3000, "max_model_len": 4096}
    return Engine(EngineConfig(model=str(demo_model()), **plain | settings))


def _waste() -> Iterator[str]:
    yield "## 100 tokens"
    yield ""
    held = -(-100 // BLOCK_SIZE) * BLOCK_SIZE
    yield f"A fixed cache of {FIXED_TOKENS} tokens a sequence wastes {1 - 100 / FIXED_TOKENS:.1%};"
    yield f"paging holds {held} for them and wastes {1 - 100 / held:.1%}."


def _live_waste() -> Iterator[str]:
    yield "## A live mixed load"
    yield ""
    yield "Tokens that held blocks could store but do not, mean over all steps; swapped sequences count too."
    yield ""
    yield "| load | mean waste | blocks in use, peak |"
    yield "|---|---|---|"
    for name, load in _loads().items():
        for num_blocks in (3000, 500):
            engine = _engine(num_kv_blocks=num_blocks, num_swap_blocks=600)
            for i, (prompt, output, n) in enumerate(load):
                params = SamplingParams(temperature=1, max_tokens=output, ignore_eos=True, n=n)
                engine.add(EngineRequest(str(i), prompt, params, seed=i))
            wastes, peak = _watch(engine)
            yield f"| {name}; {num_blocks} blocks | {mean(wastes):.1%} | {peak} |"


def _loads() -> dict[str, Load]:
    short, long = offline_mix(64, seed=1), [(r.prompt * 4, 2 * r.num_output) for r in offline_mix(32, seed=2)]
    return {
        "prompts 16–512, outputs 16–256": [(r.prompt, r.num_output, 1) for r in short],
        "the same, every 4th with n = 4": [(r.prompt, r.num_output, 1 + 3 * (i % 4 == 0)) for i, r in enumerate(short)],
        "prompts 64–2,048, outputs 32–512": [(prompt, output, 1) for prompt, output in long],
    }


def _block_sizes() -> Iterator[str]:
    yield "## Block sizes"
    yield ""
    yield "Waste of the same loads, scheduled without a model, with blocks of 8, 16 and 32 tokens:"
    yield ""
    yield "| load | 8 | 16 | 32 |"
    yield "|---|---|---|---|"
    for name, load in _loads().items():
        yield f"| {name} | {' | '.join(f'{block_waste(load, size):.1%}' for size in (8, 16, 32))} |"


def _watch(engine: Engine) -> tuple[list[float], int]:
    wastes, peak = [], 0
    while engine.has_work():
        engine.step()
        stats = engine.stats()
        held = stats.kv_blocks_total - stats.kv_blocks_free
        allocated = (held + stats.swap_blocks_total - stats.swap_blocks_free) * BLOCK_SIZE
        if stats.num_running + stats.num_swapped:
            wastes.append(1 - stats.kv_tokens_used / allocated)
            peak = max(peak, held)
    return wastes, peak


def _copies() -> Iterator[str]:
    yield "## Copies"
    yield ""
    engine = _engine(num_swap_blocks=1000)
    runner, sizes = engine._runner, engine._runner.cache_sizes
    _touch(engine)
    count = 512
    pairs = [(1 + i, 1 + sizes.num_device_blocks + i) for i in range(count)]
    plan = _plan([1], [[5]], copies=np.array(pairs, np.int32))
    best_ms = min(runner.submit(plan).result().copy_ms for _ in range(REPEATS))
    rate = count * sizes.block_bytes / best_ms * 1e3 / 2**30
    tokens = np.arange(512, dtype=np.int32) + 1000
    chunk = _plan([512], [list(range(100, 132))], token_ids=tokens)
    prefill_ms = min(runner.submit(chunk).result().forward_ms for _ in range(REPEATS)) * BLOCK_SIZE / 512
    yield f"A block of {sizes.block_bytes / 2**10:.0f} KiB goes to the host at {rate:.0f} GiB/s. Computing it again"
    yield f"takes {prefill_ms:.2f} ms; out and in again by copies, {2 * best_ms / count:.2f} ms."


def _tiers() -> Iterator[str]:
    rng = random.Random(0)
    engine = _engine(num_kv_blocks=140, num_swap_blocks=400)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(2049)] for _ in range(2)]
    times: dict[str, list[float]] = {"computed": [], "in the first tier": [], "evicted to the host": []}
    for i in range(3):
        fresh = [rng.randrange(1000, 40_000) for _ in range(2049)]
        for kind, prompt in (
            ("computed", fresh),
            ("in the first tier", fresh),
            ("", prompts[i % 2]),
            ("evicted to the host", fresh),
        ):
            started_s = time.perf_counter()
            engine.generate([prompt], ONE)
            if kind:
                times[kind].append((time.perf_counter() - started_s) * 1e3)
    yield f"A prefix of 2,048 tokens: {', '.join(f'{min(of):.0f} ms {kind}' for kind, of in times.items())}."


def _shared_prefix() -> Iterator[str]:
    rng = random.Random(1)
    prefix = [rng.randrange(1000, 40_000) for _ in range(1024)]
    prompts = [[*prefix, *(rng.randrange(1000, 40_000) for _ in range(16))] for _ in range(64)]
    means = []
    for cached in (True, False):
        engine = _engine(num_kv_blocks=5000, enable_prefix_caching=cached, max_num_seqs=64)
        for i, prompt in enumerate(prompts):
            engine.add(EngineRequest(str(i), prompt, ONE, seed=0))
        started_s, times = time.perf_counter(), []
        while engine.has_work():
            times += [time.perf_counter() - started_s for _ in engine.step()]
        means.append(mean(times))
    yield "64 requests with a common prefix of 1,024 tokens get their first token"
    yield f"{means[1] / means[0]:.1f} times sooner with the prefix cache."


def _layouts() -> Iterator[str]:
    engine = _engine(num_kv_blocks=2000)
    _touch(engine)
    in_order = np.arange(1, 1 + 16 * 64, dtype=np.int32)
    anywhere = np.random.default_rng(0).permutation(1999).astype(np.int32)[: 16 * 64] + 1
    best = {}
    for _ in range(REPEATS):
        for name, blocks in (("in order", in_order), ("anywhere", anywhere)):
            plan = _plan([1] * 16, blocks.reshape(16, 64).tolist(), context=1024)
            best[name] = min(best.get(name, 1e9), engine._runner.submit(plan).result().forward_ms)
    yield f"A step in which 16 sequences of 1,024 tokens decode takes {best['in order']:.1f} ms with blocks in order,"
    yield f"and {best['anywhere']:.1f} ms with blocks anywhere: kilobytes are read at once, so nothing is compacted."


def _touch(engine: Engine) -> None:
    """Store something in every block: pages that were never written are not memory yet."""
    sizes = engine._runner.cache_sizes
    copies = np.array([(block, block + 1) for block in range(1, sizes.num_blocks - 1)], np.int32)
    engine._runner.submit(_plan([1], [[1]], copies=copies)).result()


def _plan(
    counts: list[int],
    tables: list[list[int]],
    *,
    context: int | None = None,
    token_ids: np.typing.NDArray[np.int32] | None = None,
    copies: np.typing.NDArray[np.int32] | None = None,
) -> StepPlan:
    """A step that samples nothing: sequences that compute so many tokens, the last of `context`."""
    ends = [context or count for count in counts]
    positions = [at for count, end in zip(counts, ends, strict=True) for at in range(end - count, end)]
    return StepPlan(
        token_ids=np.full(len(positions), 1000, np.int32) if token_ids is None else token_ids,
        positions=np.array(positions, np.int32),
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        context_lens=np.array(ends, np.int32),
        block_tables=np.array(tables, np.int32),
        sample_tokens=np.empty(0, np.int32),
        sampling=NO_ROWS,
        **({} if copies is None else {"copies": copies}),
    )


if __name__ == "__main__":
    main()
