"""`PYTHONPATH=ops python -m bench.studies.recurrent run`: models with recurrent layers beside llama.cpp.

`prepare` makes the files before. `firsts` measures penstock alone: when the first tokens come of prompts that begin
with the same system prompt. The models have the shapes of Qwen3.5-0.8B and LFM2-350M and random weights. Both engines
read the same GGUF files, and run by turns. Needs `make bench-peers PEERS=llamacpp`, of which `llama-quantize`
and `llama-batched-bench` are enough.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import machine, peers
from bench.contestants import NUM_CORES
from bench.weights import FOLDER

if TYPE_CHECKING:
    from penstock.gpu_node.engine import Engine

RESULTS = Path(__file__).parents[1] / "results"
PROMPTS = (512, 4096)
NUM_DECODED = 32
NUM_AT_ONCE, SHORT = 16, 64
GOALS = {"prompt 512": 1.3, "prompt 4096": 1.3, "one stream": 1.1, "16 at once": 2.0}
"""What ours ÷ llama.cpp's must reach with AVX-512, in tokens per second."""
SYSTEM, OWN, NUM_FIRSTS = 2000, 24, 4
"""Tokens that prompts begin with, those behind them, and how many such prompts come one after another."""
MOST_OF_COLD = 0.1
"""The most that the third prompt's first token may take of the first one's. The second one leaves the snapshot."""
_QWEN = {
    "tie_word_embeddings": True,
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
}
_LFM2 = {
    "vocab_size": 65_536,
    "hidden_size": 1024,
    "intermediate_size": 4608,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "layer_types": [("full_attention" if at in (2, 5, 8, 10, 12, 14) else "conv") for at in range(16)],
}
_TEXTS = {"max_position_embeddings": 32_768, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": None}
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3.5-0.8b": ("Qwen3_5TextConfig", "qwen35", _QWEN),
    "lfm2-350m": ("Lfm2Config", "lfm2", _LFM2),
}
"""By name: the class of transformers' config, the architecture of GGUF, and the sizes."""
KINDS = ("Q8_0", "Q4_K_M")
HEAD = f"""# Models with recurrent layers, {{date}}

`PYTHONPATH=ops python -m bench.studies.recurrent run` on {{cpu}}, {NUM_CORES} threads: random weights in the shapes of
Qwen3.5-0.8B and LFM2-350M, beside the llama.cpp of `make bench-peers` (`llama-batched-bench`), by turns, {{rounds}}
rounds, medians. Prompts and one stream in tokens/s; {NUM_AT_ONCE} at once: prompts of {SHORT} and {NUM_DECODED} tokens
out, generated tokens ÷ whole time. Other processes took {{foreign:.0%}} of the machine.

| model | load | penstock | llama.cpp | ours ÷ theirs | goal |
|---|---|---|---|---|---|
"""

FIRSTS = """# First tokens behind a system prompt, {date}

`PYTHONPATH=ops python -m bench.studies.recurrent firsts` on {cpu}, {threads} threads: the time to the first token of
prompts one after another, each of {own} tokens behind the same {system}, {rounds} rounds, medians. Other processes took
{foreign:.0%} of the machine.

| model | 1st, cold | 2nd | 3rd | 4th | 3rd ÷ 1st | goal |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("prepare", "run", "ours", "firsts", "first"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--prompts", type=int, nargs="*", default=[*PROMPTS])
    parser.add_argument("--model", type=Path, help="of `ours` and `first`: the file")
    parser.add_argument("--write", action="store_true", help="write results/recurrent.md, recurrent_firsts.md")
    args = parser.parse_args()
    if args.action == "ours":
        print(json.dumps(_ours(args.model, args.prompts)))
        return
    if args.action == "first":
        print(json.dumps(_first_tokens(args.model)))
        return
    files = {(name, kind): file_of(name, kind) for name in args.only for kind in args.kinds}
    if args.action == "run":
        _run(files, args.prompts, args.rounds, is_written=args.write)
    if args.action == "firsts":
        _run_firsts(files, args.rounds, is_written=args.write)


def file_of(name: str, kind: str) -> Path:
    """Return a GGUF file of a shape, which is made at the first call."""
    folder = FOLDER / name
    path = folder / f"{kind.lower()}.gguf"
    if not path.exists():
        source = folder / "bf16.gguf"
        if not source.exists():
            _write(name, folder)
        building = folder / f".{path.name}"
        subprocess.run([peers.llama_binary("llama-quantize"), source, building, kind], check=True)
        building.rename(path)
    return path


def _write(name: str, folder: Path) -> None:
    """Write a random model as a folder, and as a GGUF file in bfloat16."""
    import torch
    import transformers
    from fixtures.gguf_file import write_gguf

    from bench.larger.models import write_texts

    kind, architecture, sizes = SHAPES[name]
    config = getattr(transformers, kind)(**sizes | _TEXTS)
    hf = folder / "hf-bf16"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(hf, max_shard_size="100GB")
    del model
    write_texts(hf, json.loads((hf / "config.json").read_text()))
    building = folder / ".bf16.gguf"
    write_gguf(hf, building, architecture)
    building.rename(folder / "bf16.gguf")


def _run(files: dict[tuple[str, str], Path], prompts: list[int], rounds: int, *, is_written: bool) -> None:
    foreign, found = machine.ForeignCpu(), dict[tuple[str, str, str, str], list[float]]()
    for turn in range(rounds):
        for (name, kind), path in files.items():
            engines = [("ours", _ours_apart), ("theirs", _theirs)]
            for engine, measure in engines[:: 1 if turn % 2 == 0 else -1]:
                for load, speed in measure(path, prompts).items():
                    found.setdefault((name, kind, load, engine), []).append(speed)
                    print(name, kind, load, engine, f"{speed:.1f}", file=sys.stderr, flush=True)
    facts = machine.describe() | {"foreign": foreign.share(), "rounds": rounds}
    text = HEAD.format(**facts) + "".join(_lines(found))
    print(text)
    if is_written:
        (RESULTS / "recurrent.md").write_text(text)


def _run_firsts(files: dict[tuple[str, str], Path], rounds: int, *, is_written: bool) -> None:
    foreign, lines = machine.ForeignCpu(), list[str]()
    for (name, kind), path in files.items():
        command = [sys.executable, "-m", "bench.studies.recurrent", "first", "--model", str(path)]
        took = [
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
            for _ in range(rounds)
        ]
        medians = [statistics.median(one) for one in zip(*took, strict=True)]
        share = medians[2] / medians[0]
        cells = " | ".join(f"{1000 * took_s:,.0f} ms" for took_s in medians)
        met = "met" if share <= MOST_OF_COLD else "missed"
        lines.append(f"| {name} {kind} | {cells} | {share:.3f} | ≤ {MOST_OF_COLD} {met} |\n")
        print(lines[-1], end="", file=sys.stderr, flush=True)
    sizes = {"threads": NUM_CORES, "own": OWN, "system": f"{SYSTEM:,}", "rounds": rounds}
    text = FIRSTS.format(**machine.describe(), **sizes, foreign=foreign.share()) + "".join(lines)
    print(text)
    if is_written:
        (RESULTS / "recurrent_firsts.md").write_text(text)


def _lines(found: dict[tuple[str, str, str, str], list[float]]) -> Iterator[str]:
    medians = {key: statistics.median(values) for key, values in found.items()}
    for (name, kind, load, engine), ours in medians.items():
        theirs = medians.get((name, kind, load, "theirs"))
        if engine == "ours" and theirs is not None:
            goal = GOALS.get(load, GOALS["prompt 4096"])
            met = "met" if ours / theirs >= goal else "missed"
            yield f"| {name} {kind} | {load} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} | ≥ {goal} {met} |\n"


def _ours_apart(path: Path, prompts: list[int]) -> dict[str, float]:
    """Measure penstock in a process of its own."""
    command = [sys.executable, "-m", "bench.studies.recurrent", "ours", "--model", path, "--prompts"]
    done = subprocess.run([*command, *map(str, prompts)], check=True, stdout=subprocess.PIPE, text=True)
    speeds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return speeds


def _ours(path: Path, prompts: list[int]) -> dict[str, float]:
    """Return penstock's tokens per second by load."""
    engine, rng = _packed_engine(path), random.Random(0)

    def times(count: int, length: int, num_output: int) -> list[list[float]]:
        return _times(engine, [_random_ids(rng, length) for _ in range(count)], num_output)

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


def _first_tokens(path: Path) -> list[float]:
    """Return how long the first token of each prompt behind the same system prompt takes."""
    engine, rng, took = _packed_engine(path), random.Random(0), list[float]()
    _times(engine, [_random_ids(rng, SHORT)], 8)
    system = _random_ids(rng, SYSTEM)
    for _ in range(NUM_FIRSTS):
        prompt, began_s = system + _random_ids(rng, OWN), time.monotonic()
        [[at_s]] = _times(engine, [prompt], 1)
        took.append(at_s - began_s)
    return took


def _packed_engine(path: Path) -> Engine:
    """Return an engine of native kernels whose weights are packed."""
    from penstock.gpu_node.engine import Engine, EngineConfig
    from penstock.gpu_node.model.native.runner import NativeRunner

    engine = Engine(EngineConfig(model=str(path), kv_cache_dtype="int8", max_num_seqs=NUM_AT_ONCE, max_model_len=8192))
    runner = engine._runner
    assert isinstance(runner, NativeRunner)
    runner.wait_until_packed()
    engine.bind_thread()
    return engine


def _random_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(length)]


def _times(engine: Engine, prompts: list[list[int]], num_output: int) -> list[list[float]]:
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


def _theirs(path: Path, prompts: list[int]) -> dict[str, float]:
    """Return llama.cpp's tokens per second by load."""
    speeds = {}
    for found in _batched(path, prompts, 1):
        speeds[f"prompt {found['pp']}"] = found["speed_pp"]
        # At a context as short as ours if there are several.
        speeds.setdefault("one stream", found["speed_tg"])
    for found in _batched(path, [SHORT], 1):
        speeds["one stream"] = found["speed_tg"]
    for found in _batched(path, [SHORT], NUM_AT_ONCE):
        speeds[f"{NUM_AT_ONCE} at once"] = NUM_AT_ONCE * NUM_DECODED / found["t"]
    return speeds


def _batched(path: Path, prompts: list[int], count: int) -> list[dict[str, float]]:
    # Each sequence has a cache of its own, of whole units of 256 tokens.
    context = count * -(-(max(prompts) + NUM_DECODED) // 256) * 256
    sizes = {"-c": context, "-npp": ",".join(map(str, prompts)), "-ntg": NUM_DECODED, "-npl": count}
    options = {"-m": path, "-t": NUM_CORES, "-tb": NUM_CORES, "--output-format": "jsonl", **sizes}
    words = [str(word) for pair in options.items() for word in pair]
    command = [str(peers.llama_binary("llama-batched-bench")), *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    main()
