"""Perplexities as tables; see bench.studies.perplexity."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

WINDOW = 1024
NUM_WINDOWS = 20
COMPARED = (0, 5, 10, 15)
"""Windows whose whole distributions are compared with the reference's."""
CHUNK = 256
BOUND = 1.01
"""Of the native bfloat16 runner's perplexity: what a default may cost."""

STORED = "stored"


@dataclass(frozen=True)
class Setting:
    """One way to compute with one set of weights."""

    grid: str
    """STORED: the weights as the file has them; else one of bench.studies.grids."""
    engine: str
    weights: str
    kv: str

    @property
    def name(self) -> str:
        return f"{self.grid}: {self.engine} {self.weights}, KV {self.kv}"


REFERENCE = Setting(STORED, "transformers", "float32", "float32")
BF16 = ("native", "none", "bfloat16")
QUANTIZED = ("int8", "int8_group", "int4")


def ratio_of(ours: list[float], others: list[float]) -> tuple[float, float]:
    """Perplexity by perplexity of the same windows, and how far off the text's choice may have put it (95 %)."""
    gaps = [a - b for a, b in zip(ours, others, strict=True)]
    ratio = math.exp(statistics.mean(gaps))
    return ratio, ratio * 2 * statistics.stdev(gaps) / len(gaps) ** 0.5


def table(runs: dict[str, dict[str, Any]], grid: str) -> list[str]:
    """The settings on one grid."""
    reference, base = runs[REFERENCE.name], runs.get(Setting(grid, *BF16).name)
    lines = [
        "| engine | weights | KV | perplexity | ÷ transformers float32 | ÷ native bf16 | KL, nats | same top token |",
        "|---" * 8 + "|",
    ]
    for run in runs.values():
        if run["grid"] != grid:
            continue
        against = [ratio_of(run["nll"], other["nll"]) if other else None for other in (reference, base)]
        ratios = " | ".join("–" if one is None else f"{one[0]:.4f} ± {one[1]:.4f}" for one in against)
        perplexity = math.exp(statistics.mean(run["nll"]))
        figures = f"{perplexity:.3f} | {ratios} | {run['kl']:.5f} | {run['top1']:.2%}"
        lines.append(f"| {run['engine']} | {run['weights']} | {run['kv']} | {figures} |")
    return [*lines, ""]


def verdicts(runs: dict[str, dict[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """Of each native setting its perplexity by native bf16's, on each grid where both were measured."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for run in runs.values():
        base = runs.get(Setting(run["grid"], *BF16).name)
        if run["engine"] == "native" and base is not None:
            found.setdefault((run["weights"], run["kv"]), {})[run["grid"]] = ratio_of(run["nll"], base["nll"])[0]
    return found


_HEADINGS = {
    STORED: "As the file stores them: layers in Q4_1, embedding and head in Q8_0",
    "scaled": "Scaled: every matrix off that grid, outliers kept",
    "rotated": "Rotated: every matrix off that grid, outliers spread",
}
_LIMITS = """\
Ratios are of the same windows, ± 95 % over the choice of windows. Each grid is compared with transformers on the stored
weights, because its function is the same. `native` is the runner itself. With every quantized format its activations
are in int8: one scale a token with `int8`, one for 32 channels with the groups. `rounded` has the weights quantized and
dequantized by other code and computes in bfloat16: the weights' share alone. `int8` rotates all channels by Hadamard
and cosine matrices when it loads. That partly undoes what `rotated` did with the same Hadamard matrices.

What this does not say:

- The demo model's layers were on a 4-bit grid before we had them. What 4 bits cost against the model as it was trained
  is in every row here, the reference too, and cannot be measured with this file. `auto` loses nothing of *the file*.
- For the same reason int4 of the stored layers finds their own grid again; of the embedding and the head it does not.
  The other two tables change the weights but not the function. `scaled` multiplies channels by random factors, which
  keeps outliers and widens a group's range. `rotated` mixes 64 channels, which spreads outliers of activations too and
  makes weights Gaussian. They show what rounding to a fresh grid costs this model, a second time. A checkpoint that was
  never quantized is another matter, but nothing here says that it would lose less.
- The embedding's rows stay as stored in `scaled`; the head's do not.
- It is one model of 135M parameters and one English text, part of which it will have seen in training. Larger models
  mostly lose less by quantization.
"""


def report(content: dict[str, Any]) -> str:
    """The results as text."""
    runs, about, text = content["runs"], content["machine"], content["text"]
    lines = [
        f"# Perplexity, {about['date']}",
        "",
        f"`{content['command']}` on {about['cpu']}, Python {about['python']}. The text is {text['source']}: "
        f"{text['scored']:,} scored tokens in {NUM_WINDOWS} windows of {WINDOW:,}, read in chunks of {CHUNK} "
        f"(transformers: at once). Distributions are compared over {len(COMPARED)} windows.",
        "",
        f"## Within {BOUND - 1:.0%} of bfloat16's perplexity?",
        "",
        "| weights | KV | " + " | ".join(_HEADINGS) + " | |",
        "|---" * (len(_HEADINGS) + 3) + "|",
    ]
    for (weights, kv), by_grid in verdicts(runs).items():
        cells = " | ".join(f"{by_grid[grid]:.4f}" if grid in by_grid else "–" for grid in _HEADINGS)
        answer = "yes" if max(by_grid.values()) <= BOUND else "**no**"
        lines.append(f"| {weights} | {kv} | {cells} | {answer} |")
    lines += ["", _LIMITS]
    for grid, heading in _HEADINGS.items():
        if any(run["grid"] == grid for run in runs.values()):
            lines += [f"## {heading}", "", *table(runs, grid)]
    return "\n".join(lines)
