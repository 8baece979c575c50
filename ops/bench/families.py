"""`PYTHONPATH=ops:tests python -m bench.families`: how far each runner and format is from transformers, by family.

Small random models in bfloat16, one for each feature; transformers computes them in float32.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fakes.plans import Track, logits_of_step
from fakes.random_families import FAMILIES, make_family_model
from numpy.typing import NDArray

from bench import machine
from penstock.gpu_node.model.load import load_model
from penstock.gpu_node.model.protocol import RunnerOptions

RESULTS = Path(__file__).parent / "results"
SETTINGS = (
    ("torch", "float32", "none"),
    ("native", "bfloat16", "none"),
    ("native", "bfloat16", "int8"),
    ("native", "bfloat16", "int4"),
)
NUM_PROMPTS = 50
MAX_LENGTH = 160
BLOCK = 16
# Large enough that quantised sums average over many columns; narrow enough that scores do not saturate.
SIZES = {"hidden_size": 384, "initializer_range": 0.06}
GROWN_BY_LENGTH = "llama dynamic"
"""Angles that depend on how long a text has become: no single pass of transformers has them."""

HEAD = f"""# Families, {{date}}

`PYTHONPATH=ops:tests python -m bench.families`: {NUM_PROMPTS} texts of 8 to {MAX_LENGTH} tokens in mixed batches, small
random models in bfloat16, against transformers in float32: the largest error of a logit, the errors' root mean square
by the logits' spread, and how often the same token is the best. Random weights are the worst case of four bits, trained
ones lose far less ([perplexity](perplexity.md), which has GGUF too). `int8` has a scale for each group of 32 in
families with layer norms.
"""


def prompts() -> list[list[int]]:
    """Texts of any length up to MAX_LENGTH, most of which go beyond every window and original length."""
    rng = random.Random(0)
    return [rng.choices(range(384), k=rng.randint(8, MAX_LENGTH)) for _ in range(NUM_PROMPTS)]


def logits_together(runner: Any, texts: list[list[int]]) -> list[NDArray[np.float32]]:
    """Of all texts in mixed steps: each takes part in chunks of other sizes until it is read."""
    width = -(-MAX_LENGTH // BLOCK)
    tracks = [Track(text, range(1 + i * width, 1 + (i + 1) * width)) for i, text in enumerate(texts)]
    rng, parts = random.Random(1), [[] for _ in texts]
    while any(track.left for track in tracks):
        step = [(track, min(track.left, rng.choice((1, 7, 20)))) for track in tracks if track.left]
        for (track, _), logits in zip(step, logits_of_step(runner, step), strict=True):
            parts[next(i for i, one in enumerate(tracks) if one is track)].append(logits)
    return [np.concatenate(part) for part in parts]


def wanted(folder: Path, texts: list[list[int]]) -> list[NDArray[np.float32]]:
    """Transformers' logits in float32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder).to(torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([text])).logits[0].numpy() for text in texts]


def measure(folder: Path, texts: list[list[int]], want: list[NDArray[np.float32]]) -> Iterator[dict[str, Any]]:
    """Each setting's largest error, its size beside the logits' spread, and how often the best token is the same."""
    for runner, dtype, quantization in SETTINGS:
        options = RunnerOptions(
            runner=runner,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype="auto",
            block_size=BLOCK,
            num_blocks=NUM_PROMPTS * -(-MAX_LENGTH // BLOCK),
            kv_cache_gib=1.0,
            max_model_len=None,
            max_num_seqs=NUM_PROMPTS,
            num_threads=None,
        )
        loaded = load_model(str(folder), options, lambda stage, fraction: None)
        got, all_want = (np.concatenate(x) for x in (logits_together(loaded.runner, texts), want))
        yield {
            "arithmetic": loaded.arithmetic,
            "max_error": float(np.abs(got - all_want).max()),
            "rms_error": float(np.sqrt(np.square(got - all_want).mean()) / all_want.std()),
            "same_best": float((got.argmax(-1) == all_want.argmax(-1)).mean()),
        }


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """All of it as Markdown."""
    columns = " | ".join(" ".join(setting) for setting in SETTINGS)
    lines = [
        HEAD.format(date=machine.describe()["date"]),
        f"| family | {columns} |",
        "|---" * (1 + len(SETTINGS)) + "|",
    ]
    for name, runs in found.items():
        cells = (f"{r['max_error']:.2g} · {r['rms_error']:.2g} · {r['same_best']:.2%}" for r in runs)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures every family and writes both results."""
    found, texts = {}, prompts()
    for name in FAMILIES:
        if name == GROWN_BY_LENGTH:
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = make_family_model(Path(folder), name, "bfloat16", **SIZES)
            found[name] = list(measure(model, texts, wanted(model, texts)))
        sys.stderr.write(f"{name}: {found[name]}\n")
    (RESULTS / "families.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "families.md").write_text(table(found))


if __name__ == "__main__":
    main()
