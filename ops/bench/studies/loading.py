"""`PYTHONPATH=ops python -m bench.studies.loading`: memory and time of loading, and what two nodes share.

A large model is made for it: random, in the shape of a Llama, safetensors in shards.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine, peers

RESULTS = Path(__file__).parents[1] / "results"
FOLDER = peers.BUILD / "bench" / "loading"
MIB = 1 << 20
LARGE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}
QUANTIZATIONS = ("auto", "int8")
SMALL_GGUF, SMALL_FOLDER, LARGE_FOLDER = "SmolLM2, GGUF Q4_1", "SmolLM2, bf16", "random Llama, bf16 in shards"

HEAD = """# Loading, {date}

`PYTHONPATH=ops PYTHONSAFEPATH=1 .venv/bin/python -m bench.studies.loading` on {cpu}, {cores} cores. Every line is a
process that loads a model and runs one step; checkpoints are in the page cache. *Packs*: the first process, which
writes the cached file; *maps*: any later one. ÷: the most memory by the size of the weights.

| model | weights | start | ÷ | load, s | step 1, ms |
|---|---|---|---|---|---|
"""
SHARED = """
## Two nodes on one machine

Both at once, after a step. A proportional size (PSS) counts a page by half where two processes map it.

| model | weights, MiB | each: PSS, MiB | both together, MiB | without a shared file |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Loaded:
    """A process that has loaded a model, and the times that it printed."""

    process: subprocess.Popen[str]
    measured: dict[str, float]

    def rollup_mib(self, field: str) -> float:
        """Of /proc/…/smaps_rollup."""
        return _kib(Path(f"/proc/{self.process.pid}/smaps_rollup").read_text(), field) / 1024


def start(model: Path, quantization: str, cache: Path, *, shares: bool) -> Loaded:
    """Load a model in a process that stays."""
    command = [sys.executable, "-m", "bench.studies.loading", str(model), quantization, str(int(shares))]
    env = os.environ | {"PENSTOCK_CACHE": str(cache)}
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return Loaded(process, json.loads(process.stdout.readline()))


def end(loaded: Loaded) -> None:
    """Let it go."""
    loaded.process.communicate()


def child(model: str, quantization: str, shares: str) -> None:
    """Load, run a step, print the times, and wait until stdin ends."""
    from fixtures.plans import logits_alone

    from penstock.gpu_node.model.loading.load import load_model
    from penstock.gpu_node.model.options import RunnerOptions

    options = RunnerOptions(
        runner="native",
        dtype="bfloat16",
        quantization=quantization,
        block_size=16,
        num_kv_blocks=8,
        max_model_len=128,
        max_num_seqs=1,
        weight_cache=shares == "1",
    )
    before_kib = _status("VmRSS")
    started_s = time.perf_counter()
    loaded: Any = load_model(model, options, lambda _stage, _fraction: None).runner
    loaded_s = time.perf_counter()
    logits_alone(loaded, [5])
    stepped_s = time.perf_counter()
    loaded.wait_until_packed()
    measured = {
        "most_mib": (_status("VmHWM") - before_kib) / 1024,
        "load_s": loaded_s - started_s,
        "step_ms": (stepped_s - loaded_s) * 1e3,
    }
    print(json.dumps(measured), flush=True)
    sys.stdin.read()


def _status(field: str) -> int:
    return _kib(Path("/proc/self/status").read_text(), field)


def _kib(text: str, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        raise LookupError(field)
    return int(found[1])


def models() -> dict[str, Path]:
    """The demo model's file, its weights in bfloat16, and a large one that is made at the first run."""
    from fixtures.dequantized import dequantized

    from penstock.cli.demo_model import demo_model

    gguf = demo_model()
    large = FOLDER / "large"
    if not large.is_dir():
        _make_large(large)
    return {SMALL_GGUF: gguf, SMALL_FOLDER: dequantized(gguf), LARGE_FOLDER: large}


def _make_large(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(LlamaConfig(**LARGE))
    building = folder.with_name(".large")
    model.save_pretrained(building, max_shard_size="200MB")
    building.rename(folder)


@contextmanager
def fresh_cache() -> Iterator[Path]:
    """A cache folder in which nothing is packed yet."""
    from penstock.gpu_node.model.checkpoint.conversion_cache import cache_folder

    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        for kept in ("native", "models"):
            (Path(folder) / kept).symlink_to(cache_folder() / kept)
        yield Path(folder)


def loadings(name: str, model: Path, quantization: str) -> Iterator[str]:
    """Yield lines of the first table."""
    with fresh_cache() as cache:
        for start_name in ("packs", "maps"):
            loaded = start(model, quantization, cache, shares=True)
            end(loaded)
            measured = loaded.measured
            cells = [name, quantization, start_name, f"{measured['most_mib'] / packed_mib(cache):.2f}"]
            yield f"| {' | '.join(cells)} | {measured['load_s']:.2f} | {measured['step_ms']:.0f} |"


def sharing(name: str, model: Path) -> str:
    """Return a line of the second table."""
    with fresh_cache() as cache:
        end(start(model, "auto", cache, shares=True))
        sizes = {}
        for shares in (True, False):
            pair = [start(model, "auto", cache, shares=shares) for _ in range(2)]
            sizes[shares] = [loaded.rollup_mib("Pss") for loaded in pair]
            for loaded in pair:
                end(loaded)
        each, together, apart = sizes[True][0], sum(sizes[True]), sum(sizes[False])
        return f"| {name} | {packed_mib(cache):.0f} | {each:.0f} | {together:.0f} | {apart:.0f} |"


def packed_mib(cache: Path) -> float:
    """What was packed there."""
    return sum(path.stat().st_size for path in (cache / "weights").iterdir()) / MIB


def main() -> None:
    """Writes results/loading.md."""
    known, others = models(), machine.ForeignCpu()
    lines = [HEAD.format(**machine.describe())]
    for name, model in known.items():
        for quantization in QUANTIZATIONS:
            lines += [f"{line}\n" for line in loadings(name, model, quantization)]
    lines += [SHARED, *(f"{sharing(name, model)}\n" for name, model in known.items())]
    lines.append(f"\nOthers took {others.share():.0%} of the CPU.\n")
    (RESULTS / "loading.md").write_text("".join(lines))


if __name__ == "__main__":
    child(*sys.argv[1:]) if len(sys.argv) > 1 else main()
