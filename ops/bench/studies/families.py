"""`PYTHONPATH=ops python -m bench.studies.families`: how far each runner and format is from transformers.

Small random models in bfloat16, one for each feature of each family; transformers computes them in float32. Then one of
them in every layout of quantized checkpoints and every format of GGUF, against the numbers that those mean.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fixtures.gguf_file import gguf_values, write_gguf
from fixtures.quantized_checkpoint import LAYOUTS, write_quantized
from fixtures.random_families import FAMILIES, GROWN_BY_LENGTH, make_family_model
from torch import Tensor

from bench import machine
from bench.report import write_raw
from bench.studies.agreement import NUM_PROMPTS, cell, measure, prompts, wanted
from penstock.gpu_node.model.checkpoint.source import ModelSource

RESULTS = Path(__file__).parents[1] / "results"
TORCH = ("torch", "float32", "none")
SETTINGS = (TORCH, *(("native", "bfloat16", quantization) for quantization in ("none", "int8", "int4")))
AS_STORED = ("native", "bfloat16", "auto")
GGUF_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
GGUF_OF_FAMILIES = "q8_0"
OLD_KINDS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "f16", "bf16")
GGUF_KINDS = (*OLD_KINDS, "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")
# Large enough that quantized sums average over many columns; narrow enough that scores do not saturate.
SIZES = {"hidden_size": 384, "initializer_range": 0.06}
STORED_FAMILY = "qwen2"
STORED_SIZES = SIZES | {"hidden_size": 512, "intermediate_size": 512}
"""Some of GGUF's formats have blocks of 256."""

HEAD = f"""# Families, {{date}}

`PYTHONPATH=ops python -m bench.studies.families`: {NUM_PROMPTS} texts in mixed batches, small random models, against
transformers in float32. Each cell has the errors' root mean square by the logits' spread, and how often the same token
is the best. Random weights are the worst case of four bits ([perplexity](perplexity.md) has a trained model).
"""
STORED_HEAD = f"""
## As they are stored

The {STORED_FAMILY} model in each layout of quantized checkpoints. [accuracy](accuracy.md) has formats of GGUF.
"""


def of_family(name: str, texts: list[list[int]]) -> Iterator[dict[str, Any]]:
    """A family's model in each setting, and from GGUF where such files are read."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as place:
        folder = make_family_model(Path(place), name, "bfloat16", **SIZES)
        want = wanted(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), texts)
        for setting in SETTINGS:
            yield measure(ModelSource(folder), setting, texts, want)
        architecture = GGUF_ARCHITECTURES.get(json.loads((folder / "config.json").read_text())["model_type"])
        if architecture is not None:
            gguf = write_gguf(folder, folder / "m.gguf", architecture, GGUF_OF_FAMILIES)
            yield measure(ModelSource(folder, gguf), AS_STORED, texts, want)


def as_stored(texts: list[list[int]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """One model in every layout and format, on torch and on the native runner."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as place:
        folder = make_family_model(Path(place) / "model", STORED_FAMILY, "bfloat16", **STORED_SIZES)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for name, source, meant in _stored(folder, Path(place)):
            model.load_state_dict(meant, strict=False)
            want = wanted(model, texts)
            yield name, [measure(source, setting, texts, want) for setting in (TORCH, AS_STORED)]


def _stored(folder: Path, place: Path) -> Iterator[tuple[str, ModelSource, dict[str, Tensor]]]:
    for i, (name, layout) in enumerate(LAYOUTS.items()):
        meant = write_quantized(folder, layout, place / str(i))
        yield name, ModelSource(place / str(i)), meant
    architecture = GGUF_ARCHITECTURES[STORED_FAMILY]
    for kind in GGUF_KINDS:
        gguf = write_gguf(folder, place / f"{kind}.gguf", architecture, kind)
        values = gguf_values(folder, gguf, architecture)
        meant = {name: torch.from_numpy(value.copy()) for name, value in values.items()}
        yield f"GGUF {kind.upper()}", ModelSource(folder, gguf), meant


def tables(families: dict[str, list[dict[str, Any]]], stored: dict[str, list[dict[str, Any]]]) -> str:
    """All of it as Markdown."""
    columns = [*(" ".join(setting) for setting in SETTINGS), "native GGUF"]
    lines = [HEAD.format(date=machine.describe()["date"]), *_rows("family", columns, families)]
    columns = ["native", "native keeps"]
    layouts = {name: runs[-1:] for name, runs in stored.items() if not name.startswith("GGUF")}
    kept = {name: runs[-1]["arithmetic"].split("-")[2] for name, runs in layouts.items()}
    return "\n".join((*lines, STORED_HEAD, *_rows("checkpoint", columns, layouts, kept))) + "\n"


def _rows(
    head: str, columns: list[str], found: dict[str, list[dict[str, Any]]], last: dict[str, str] | None = None
) -> Iterator[str]:
    yield f"| {head} | {' | '.join(columns)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for name, runs in found.items():
        cells = [*map(cell, runs), *((last[name],) if last else ())]
        yield f"| {name} | {' | '.join(cells + [''] * (len(columns) - len(cells)))} |"


def main() -> None:
    """Measures every family and format and writes both results."""
    texts, families, stored = prompts(), {}, {}
    for name in FAMILIES:
        if name not in GROWN_BY_LENGTH:
            families[name] = list(of_family(name, texts))
            sys.stderr.write(f"{name}: {families[name]}\n")
    for name, runs in as_stored(texts):
        stored[name] = runs
        sys.stderr.write(f"{name}: {runs}\n")
    content = {"families": families, "stored": stored}
    write_raw("families", content)
    (RESULTS / "families.md").write_text(tables(families, stored))


if __name__ == "__main__":
    main()
