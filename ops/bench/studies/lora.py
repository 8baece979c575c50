"""`PYTHONPATH=ops python -m bench.studies.lora`: what low-rank adapters cost a step of the native runner."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from fixtures.dequantized import dequantized
from fixtures.plans import Track, plan_of
from fixtures.random_adapters import make_adapter
from fixtures.sampling import rows_of
from transformers import AutoModelForCausalLM

from bench import machine
from penstock.cli.demo_model import demo_model
from penstock.contract.adapters import AdapterRef
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.protocol import NO_ADAPTER, LoadedModel, ModelRunner

RESULTS = Path(__file__).parents[1] / "results"
NUM_ADAPTERS = 16
RANK = 16
NUM_SEQS = 32
CONTEXT = 256
CHUNK = 256
BLOCK = 16
ROUNDS = 12
LOADS: dict[str, list[int]] = {
    "no adapter": [NO_ADAPTER] * NUM_SEQS,
    "1 row of 32 has one": [0] + [NO_ADAPTER] * (NUM_SEQS - 1),
    "1 adapter": [0] * NUM_SEQS,
    "4 adapters": [i % 4 for i in range(NUM_SEQS)],
    "16 adapters": [i % 16 for i in range(NUM_SEQS)],
}
HEAD = f"""# Adapters, {{date}}

`PYTHONPATH=ops python -m bench.studies.lora` on {{cpu}}: SmolLM2-135M, native runner, one thread, adapters of rank
{RANK} on all matrices. Steps in which {NUM_SEQS} sequences decode at a context of {CONTEXT} alternate with a prompt's
chunk of {CHUNK} tokens. Medians of {ROUNDS} in ms of CPU time, and how much more than without adapters. `to load`:
from its file into a slot. Other processes took {{foreign:.0%}} of the machine.

| weights | {" | ".join(LOADS)} | chunk without | chunk with | to load |
|---|{"---|" * (len(LOADS) + 3)}
"""


def main() -> None:
    """Measures, prints and writes the table."""
    foreign = machine.ForeignCpu()
    with tempfile.TemporaryDirectory() as folder:
        model = dequantized(demo_model())
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        for i in range(NUM_ADAPTERS):
            make_adapter(Path(folder) / f"a{i}", base, rank=RANK, seed=i, dtype="bfloat16")
        rows = [f"| {name} | {' | '.join(_cells(model, Path(folder), name))} |" for name in ("none", "int8")]
    facts = machine.describe() | {"foreign": foreign.share()}
    text = HEAD.format(**facts) + "\n".join(rows) + "\n"
    print(text)
    (RESULTS / "lora.md").write_text(text)


def _cells(model: Path, adapters: Path, quantization: str) -> Iterator[str]:
    loaded = _load(model, adapters, quantization)
    load_ms = list(_load_ms(loaded))
    times: dict[str, list[float]] = {name: [] for name in (*LOADS, "chunk without", "chunk with")}
    tracks = [Track([7] * (CONTEXT + 1), range(1 + 17 * i, 18 + 17 * i), CONTEXT) for i in range(NUM_SEQS)]
    chunk = Track(random.Random(0).choices(range(1000), k=CHUNK), range(1, 1 + CHUNK // BLOCK))
    for _ in range(ROUNDS):
        for name, places in LOADS.items():
            for track, place in zip(tracks, places, strict=True):
                track.adapter = place
            times[name].append(_step_ms(loaded.runner, tracks, 1))
        for name, chunk.adapter in (("chunk without", NO_ADAPTER), ("chunk with", 0)):
            times[name].append(_step_ms(loaded.runner, [chunk], CHUNK))
    for name, taken in times.items():
        base = times["chunk without" if name.startswith("chunk") else "no adapter"]
        more = statistics.median(taken) / statistics.median(base) - 1
        beside = f" ({more:+.0%})" if taken is not base else ""
        yield f"{statistics.median(taken):.1f}{beside}"
    yield f"{statistics.median(load_ms):.0f}"


def _load(model: Path, adapters: Path, quantization: str) -> LoadedModel:
    options = RunnerOptions(
        runner="native",
        dtype="auto",
        quantization=quantization,
        block_size=BLOCK,
        num_kv_blocks=1 + 17 * NUM_SEQS,
        max_model_len=1024,
        max_num_seqs=NUM_SEQS,
        num_threads=1,
        weight_cache=False,
        lora_dir=adapters,
        max_loras=NUM_ADAPTERS,
        max_lora_rank=RANK,
    )
    return load_model(str(model), options, lambda *_: None)


def _load_ms(loaded: LoadedModel) -> Iterator[float]:
    for i in range(NUM_ADAPTERS):
        adapter = loaded.adapters.find(AdapterRef(name=f"a{i}"))
        started_s = time.process_time()
        loaded.runner.set_adapter(i, adapter)
        yield (time.process_time() - started_s) * 1e3


def _step_ms(runner: ModelRunner, tracks: list[Track], count: int) -> float:
    plan = plan_of([(track, count) for track in tracks], rows_of(len(tracks), temperature=0.0))
    started_s = time.process_time()
    runner.submit(plan).result()
    return (time.process_time() - started_s) * 1e3


if __name__ == "__main__":
    main()
