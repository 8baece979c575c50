"""`PYTHONPATH=ops python -m bench.studies.recurrent run`: models with recurrent layers beside llama.cpp.

`prepare` makes the files before. With `--isa avx2`, kernels without AVX-512 are compared, and a dense Llama of 1B is in
the same run: no ratio may be below the Llama's in the same format and load. A second Llama has the sizes of LFM2-350M
and attention in each layer: it tells what comes from the size and what from recurrent layers. `firsts` measures
penstock alone: when the first tokens come of prompts that begin with the same system prompt. The models have the shapes
of Qwen3.5-0.8B and LFM2-350M and random weights. Both engines read the same GGUF files, and run by turns. Needs `make
bench-peers PEERS=llamacpp`, of which `llama-quantize` and `llama-batched-bench` are enough.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench import machine
from bench.contestants import NUM_CORES
from bench.studies.beside_llamacpp import (
    DENSE,
    LLAMA_1B,
    NUM_AT_ONCE,
    NUM_DECODED,
    SHORT,
    Shape,
    by_turns,
    file_of,
    lines,
    lines_beside_dense,
    packed_engine,
    random_ids,
    times_of,
)

RESULTS = Path(__file__).parents[1] / "results"
PROMPTS = (512, 4096)
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
SHAPES: dict[str, Shape] = {
    "qwen3.5-0.8b": ("Qwen3_5TextConfig", "qwen35", _QWEN),
    "lfm2-350m": ("Lfm2Config", "lfm2", _LFM2),
}
SMALL_DENSE: dict[str, Shape] = {
    "llama-350m": (
        "LlamaConfig",
        "llama",
        {name: size for name, size in _LFM2.items() if name not in ("layer_types", "block_auto_adjust_ff_dim")}
        | {"tie_word_embeddings": True, "head_dim": 64},
    )
}
"""LFM2-350M's sizes without its recurrent layers, beside it where DENSE is."""
KINDS = ("Q8_0", "Q4_K_M")
PAGES = {"auto": "recurrent.md", "avx2": "recurrent_avx2.md", "firsts": "recurrent_firsts.md"}
"""By instruction set, and of `firsts`."""
HEAD = f"""# Models with recurrent layers, {{date}}

`PYTHONPATH=ops python -m bench.studies.recurrent run` on {{cpu}}, {NUM_CORES} threads, instruction set {{isa}}: random
weights in the shapes of Qwen3.5-0.8B and LFM2-350M, beside the llama.cpp of `make bench-peers` (`llama-batched-bench`),
by turns, {{rounds}} rounds, medians. Prompts and one stream in tokens/s; {NUM_AT_ONCE} at once: prompts of {SHORT} and
{NUM_DECODED} tokens out, generated tokens ÷ whole time. Other processes took {{foreign:.0%}} of the machine.

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
    parser.add_argument("action", choices=("prepare", "run", "firsts", "first"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--prompts", type=int, nargs="*", default=[*PROMPTS])
    parser.add_argument("--isa", default="auto", choices=("auto", "avx2"))
    parser.add_argument("--model", type=Path, help="of `first`: the file")
    parser.add_argument("--write", action="store_true", help=f"write {', '.join(PAGES.values())} in results/")
    args = parser.parse_args()
    if args.action == "first":
        print(json.dumps(_first_tokens(args.model)))
        return
    dense = () if args.isa == "auto" or args.action == "firsts" else (DENSE, *SMALL_DENSE)
    shapes = SHAPES | SMALL_DENSE | {DENSE: LLAMA_1B}
    files = {(name, kind): file_of(name, kind, shapes[name]) for name in (*dense, *args.only) for kind in args.kinds}
    if args.action == "run":
        found, facts = by_turns(files, args.prompts, args.rounds, isa=args.isa)
        text = HEAD.format(**facts, isa=args.isa) + "".join(lines_beside_dense(found) if dense else lines(found))
        print(text)
        if args.write:
            (RESULTS / PAGES[args.isa]).write_text(text)
    if args.action == "firsts":
        _run_firsts(files, args.rounds, is_written=args.write)


def _run_firsts(files: dict[tuple[str, str], Path], rounds: int, *, is_written: bool) -> None:
    foreign, rows = machine.ForeignCpu(), list[str]()
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
        rows.append(f"| {name} {kind} | {cells} | {share:.3f} | ≤ {MOST_OF_COLD} {met} |\n")
        print(rows[-1], end="", file=sys.stderr, flush=True)
    sizes = {"threads": NUM_CORES, "own": OWN, "system": f"{SYSTEM:,}", "rounds": rounds}
    text = FIRSTS.format(**machine.describe(), **sizes, foreign=foreign.share()) + "".join(rows)
    print(text)
    if is_written:
        (RESULTS / PAGES["firsts"]).write_text(text)


def _first_tokens(path: Path) -> list[float]:
    """Return how long the first token of each prompt behind the same system prompt takes."""
    engine, rng, took = packed_engine(path), random.Random(0), list[float]()
    times_of(engine, [random_ids(rng, SHORT)], 8)
    system = random_ids(rng, SYSTEM)
    for _ in range(NUM_FIRSTS):
        prompt, began_s = system + random_ids(rng, OWN), time.monotonic()
        [[at_s]] = times_of(engine, [prompt], 1)
        took.append(at_s - began_s)
    return took


if __name__ == "__main__":
    main()
