"""`PYTHONPATH=ops python -m bench.studies.popular run`: shapes of Gemma 4 and gpt-oss of about 1B beside llama.cpp.

`prepare` makes the files before. Random weights, each weight format by itself; a dense Llama of 1B is in the same run.
`--isa avx2` compares kernels without AVX-512: no ratio of a shape may be below that of the Llama in the same load.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.contestants import NUM_CORES
from bench.studies.beside_llamacpp import (
    BFLOAT16,
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
)

RESULTS = Path(__file__).parents[1] / "results"
PROMPTS = (512,)
_GEMMA4: dict[str, Any] = {
    # Two head sizes, shared keys and values, and embeddings for each layer, as E2B has them.
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 64,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
    "use_double_wide_mlp": True,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
    "final_logit_softcapping": 30.0,
}
_GPT_OSS = {
    "vocab_size": 128_256,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "max_position_embeddings": 131_072,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 5,
}
SHAPES: dict[str, Shape] = {
    DENSE: LLAMA_1B,
    "gemma4-1b": ("Gemma4TextConfig", "gemma4", _GEMMA4),
    "gpt-oss-1b": ("GptOssConfig", "gpt-oss", _GPT_OSS),
}
MXFP4 = "MXFP4_MOE"
KINDS = (BFLOAT16, "Q8_0", "Q4_K_M", MXFP4)
"""The last one is of mixtures alone: experts in MXFP4, the rest in 8 bits."""
HEAD = f"""# Shapes of Gemma 4 and gpt-oss, {{date}}

`PYTHONPATH=ops python -m bench.studies.popular run` on {{cpu}}, {NUM_CORES} threads, instruction set {{isa}}: random
weights, about 1B of them in each shape, beside the llama.cpp of `make bench-peers` (`llama-batched-bench`), by turns,
{{rounds}} rounds, medians. Prompts and one stream in tokens/s; {NUM_AT_ONCE} at once: prompts of {SHORT} and
{NUM_DECODED} tokens out, generated tokens ÷ whole time. Other processes took {{foreign:.0%}} of the machine.

| model | load | penstock | llama.cpp | ours ÷ theirs | goal |
|---|---|---|---|---|---|
"""


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("prepare", "run"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--prompts", type=int, nargs="*", default=[*PROMPTS])
    parser.add_argument("--isa", default="auto", choices=("auto", "avx2"))
    parser.add_argument(
        "--write", action="store_true", help="write results/popular.md, with --isa avx2 popular_avx2.md"
    )
    args = parser.parse_args()
    files: dict[tuple[str, str], Path] = {
        (name, kind): file_of(name, kind, SHAPES[name])
        for name in args.only
        for kind in args.kinds
        if kind != MXFP4 or "num_local_experts" in SHAPES[name][2]
    }
    if args.action == "prepare":
        return
    found, facts = by_turns(files, args.prompts, args.rounds, isa=args.isa)
    table = lines(found) if args.isa == "auto" else lines_beside_dense(found, {MXFP4: "Q4_K_M"})
    text = HEAD.format(**facts, isa=args.isa) + "".join(table)
    print(text)
    if args.write:
        name = "popular" if args.isa == "auto" else f"popular_{args.isa}"
        (RESULTS / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
