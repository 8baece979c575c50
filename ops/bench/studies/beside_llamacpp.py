"""Models of known shapes and random weights beside llama.cpp: the same GGUF files, by turns, each run a process.

`python -m bench.studies.beside_llamacpp FILE` prints penstock's speeds for a file. Studies with tables of shapes call
the rest. Needs `make bench-peers PEERS=llamacpp`, of which `llama-quantize` and `llama-batched-bench` are enough.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from bench import machine, peers
from bench.contestants import NUM_CORES
from bench.weights import FOLDER

if TYPE_CHECKING:
    from penstock.gpu_node.engine import Engine

NUM_DECODED = 32
NUM_AT_ONCE, SHORT = 16, 64
GOALS = {"prompt": 1.3, "one stream": 1.1, "16 at once": 2.0}
"""What ours ÷ llama.cpp's must reach with AVX-512, in tokens per second, by the beginning of the load's name."""
BFLOAT16 = "BF16"
Shape: TypeAlias = tuple[str, str, dict[str, Any]]
"""The class of transformers' config, the architecture of GGUF, and the sizes."""
Found: TypeAlias = dict[tuple[str, str, str, str], list[float]]
"""Tokens per second of each round, by shape, weight format, load and engine (`ours` or `theirs`)."""
DENSE = "llama-1b"
LLAMA_1B: Shape = (
    "LlamaConfig",
    "llama",
    {
        "tie_word_embeddings": True,
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
)
"""A dense model, under the name DENSE in tables: what others are compared with where GOALS do not hold."""
_TEXTS = {"max_position_embeddings": 32_768, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": None}


def file_of(name: str, kind: str, shape: Shape) -> Path:
    """Return a GGUF file of a shape, which is made at the first call. kind: a type of `llama-quantize`."""
    folder = FOLDER / name
    path = folder / f"{kind.lower()}.gguf"
    if not path.exists():
        source = folder / "bf16.gguf"
        if not source.exists():
            _write(shape, folder)
        if kind == BFLOAT16:
            return source
        building = folder / f".{path.name}"
        subprocess.run([peers.llama_binary("llama-quantize"), source, building, kind], check=True)
        building.rename(path)
    return path


def _write(shape: Shape, folder: Path) -> None:
    """Write a random model as a folder, and as a GGUF file in bfloat16."""
    import torch
    import transformers
    from fixtures.gguf_file import write_gguf

    from bench.larger.models import write_texts

    kind, architecture, sizes = shape
    config = getattr(transformers, kind)(**_TEXTS | sizes)
    hf = folder / "hf-bf16"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(hf, max_shard_size="100GB")
    del model
    write_texts(hf, json.loads((hf / "config.json").read_text()))
    building = folder / ".bf16.gguf"
    write_gguf(hf, building, architecture)
    building.rename(folder / "bf16.gguf")


def by_turns(
    files: dict[tuple[str, str], Path], prompts: list[int], rounds: int, *, isa: str = "auto"
) -> tuple[Found, dict[str, Any]]:
    """Measure both engines on each file. Return their speeds, and the facts of the run.

    prompts: their lengths; isa: `cpu_isa` of ours; with `avx2`, llama.cpp is compiled for it.
    """
    foreign, found = machine.ForeignCpu(), Found()
    engines: list[tuple[str, Callable[[Path, list[int], str], dict[str, float]]]] = [
        ("ours", _ours_apart),
        ("theirs", _theirs),
    ]
    for turn in range(rounds):
        for (name, kind), path in files.items():
            for engine, measure in engines[:: 1 if turn % 2 == 0 else -1]:
                for load, speed in measure(path, prompts, isa).items():
                    found.setdefault((name, kind, load, engine), []).append(speed)
                    print(name, kind, load, engine, f"{speed:.1f}", file=sys.stderr, flush=True)
    return found, machine.describe() | {"foreign": foreign.share(), "rounds": rounds}


def ratios_of(found: Found) -> Iterator[tuple[str, str, str, float, float]]:
    """Yield shape, weight format, load, our median and theirs, for each that both engines ran."""
    medians = {key: statistics.median(values) for key, values in found.items()}
    for (name, kind, load, engine), ours in medians.items():
        theirs = medians.get((name, kind, load, "theirs"))
        if engine == "ours" and theirs is not None:
            yield name, kind, load, ours, theirs


def lines(found: Found) -> Iterator[str]:
    """Yield the rows of a table: model, load, both speeds, their ratio and its goal."""
    for name, kind, load, ours, theirs in ratios_of(found):
        goal = next(goal for beginning, goal in GOALS.items() if load.startswith(beginning))
        met = "met" if ours / theirs >= goal else "missed"
        yield f"| {name} {kind} | {load} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} | ≥ {goal} {met} |\n"


def lines_beside_dense(found: Found, formats: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield the rows of a table whose goals are the ratios of the dense shape in the same format and load.

    formats: those of the dense shape whose ratios are the goals of another format.
    """
    rows: list[tuple[str, str, str, float, float]] = list(ratios_of(found))
    dense: dict[Any, float] = {(kind, load): ours / theirs for name, kind, load, ours, theirs in rows if name == DENSE}
    for name, kind, load, ours, theirs in rows:
        goal, ratio = dense.get(((formats or {}).get(kind, kind), load)), ours / theirs
        said = "" if goal is None or name == DENSE else f"≥ {goal:.2f} {'met' if ratio >= goal else 'missed'}"
        yield f"| {name} {kind} | {load} | {ours:.1f} | {theirs:.1f} | {ratio:.2f} | {said} |\n"


def _ours_apart(path: Path, prompts: list[int], isa: str) -> dict[str, float]:
    """Measure penstock in a process of its own."""
    command = [sys.executable, "-m", "bench.studies.beside_llamacpp", path, "--isa", isa, "--prompts"]
    done = subprocess.run([*command, *map(str, prompts)], check=True, stdout=subprocess.PIPE, text=True)
    speeds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return speeds


def _ours(path: Path, prompts: list[int], isa: str) -> dict[str, float]:
    """Return penstock's tokens per second by load."""
    engine, rng = packed_engine(path, isa), random.Random(0)

    def times(count: int, length: int, num_output: int) -> list[list[float]]:
        return times_of(engine, [random_ids(rng, length) for _ in range(count)], num_output)

    times(2, SHORT, 8)
    speeds = {}
    for length in prompts:
        began_s = time.monotonic()
        [[at_s]] = times(1, length, 1)
        speeds[f"prompt {length}"] = length / (at_s - began_s)
    [came] = times(1, SHORT, NUM_DECODED + 1)
    speeds["one stream"] = NUM_DECODED / (came[-1] - came[0])
    began_s = time.monotonic()
    several = times(NUM_AT_ONCE, SHORT, NUM_DECODED)
    ended_s = max(one[-1] for one in several)
    speeds[f"{NUM_AT_ONCE} at once"] = NUM_AT_ONCE * NUM_DECODED / (ended_s - began_s)
    return speeds


def packed_engine(path: Path, isa: str = "auto") -> Engine:
    """Return an engine of native kernels whose weights are packed. isa: `cpu_isa`."""
    from penstock.gpu_node.engine import Engine, EngineConfig
    from penstock.gpu_node.model.native.runner import NativeRunner

    sizes: dict[str, Any] = {"max_num_seqs": NUM_AT_ONCE, "max_model_len": 8192, "cpu_isa": isa}
    engine = Engine(EngineConfig(model=str(path), kv_cache_dtype="int8", **sizes))
    runner = engine._runner
    assert isinstance(runner, NativeRunner)
    runner.wait_until_packed()
    engine.bind_thread()
    return engine


def random_ids(rng: random.Random, length: int) -> list[int]:
    """Return a prompt."""
    return [rng.randrange(1000, 40_000) for _ in range(length)]


def times_of(engine: Engine, prompts: list[list[int]], num_output: int) -> list[list[float]]:
    """Return when the tokens of each prompt came, which run together."""
    from penstock.contract.job import SamplingParams
    from penstock.gpu_node.engine.records import EngineRequest

    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    came: list[list[float]] = [[] for _ in prompts]
    for i, ids in enumerate(prompts):
        engine.add(EngineRequest(str(i), ids, params, seed=0))
    while engine.has_work():
        for output in engine.step():
            came[int(output.request_id)] += [time.monotonic()] * len(output.token_ids)
        engine.wait()
    return came


def _theirs(path: Path, prompts: list[int], isa: str) -> dict[str, float]:
    """Return llama.cpp's tokens per second by load."""
    speeds = {}
    for found in _batched(path, prompts, 1, isa):
        speeds[f"prompt {found['pp']}"] = found["speed_pp"]
        # At a context as short as ours if there are several.
        speeds.setdefault("one stream", found["speed_tg"])
    for found in _batched(path, [SHORT], 1, isa):
        speeds["one stream"] = found["speed_tg"]
    for found in _batched(path, [SHORT], NUM_AT_ONCE, isa):
        speeds[f"{NUM_AT_ONCE} at once"] = NUM_AT_ONCE * NUM_DECODED / found["t"]
    return speeds


def _batched(path: Path, prompts: list[int], count: int, isa: str) -> list[dict[str, float]]:
    # Each sequence has a cache of its own, of whole units of 256 tokens.
    context = count * -(-(max(prompts) + NUM_DECODED) // 256) * 256
    sizes = {"-c": context, "-npp": ",".join(map(str, prompts)), "-ntg": NUM_DECODED, "-npl": count}
    options = {"-m": path, "-t": NUM_CORES, "-tb": NUM_CORES, "--output-format": "jsonl", **sizes}
    words = [str(word) for pair in options.items() for word in pair]
    command = [str(peers.llama_binary("llama-batched-bench", peers.AVX2 if isa == "avx2" else "")), *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Print penstock's tokens per second for a file, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--prompts", type=int, nargs="*", default=[512])
    args = parser.parse_args()
    print(json.dumps(_ours(args.file, args.prompts, args.isa)))


if __name__ == "__main__":
    main()
