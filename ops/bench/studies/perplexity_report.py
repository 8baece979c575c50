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


def verdicts(runs: dict[str, dict[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """Of each native setting its perplexity by native bf16's, on each grid where both were measured."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for run in runs.values():
        base = runs.get(Setting(run["grid"], *BF16).name)
        if run["engine"] == "native" and base is not None:
            found.setdefault((run["weights"], run["kv"]), {})[run["grid"]] = ratio_of(run["nll"], base["nll"])[0]
    return found


_GRIDS = (STORED, "scaled", "rotated")
_HEAD = """# Perplexity, {date}

`PYTHONPATH=ops python -m bench.studies.perplexity` on {cpu}. {scored:,} scored tokens of Python's help
texts; transformers in float32: {exact:.3f}, native bfloat16: {base:.3f}. Ratios to the latter, of the same windows.
*Scaled* multiplies channels by random factors, *rotated* mixes 64 channels: the function stays, but the matrices leave
the 4-bit grid of the demo model's file. *Top token*: how often it is that of float32, on the stored weights.

## Within {bound:.0%} of bfloat16's perplexity?

"""


def report(content: dict[str, Any]) -> str:
    """Return the results as a page."""
    runs, about = content["runs"], content["machine"]
    perplexities = {name: math.exp(statistics.mean(run["nll"])) for name, run in runs.items()}
    facts = {"exact": perplexities[REFERENCE.name], "base": perplexities.get(Setting(STORED, *BF16).name, math.nan)}
    facts |= {"date": about["date"], "cpu": about["cpu"]}
    lines = [
        _HEAD.format(scored=content["text"]["scored"], bound=BOUND - 1, **facts)
        + f"| weights | KV | {' | '.join(_GRIDS)} | top token | |",
        "|---" * (len(_GRIDS) + 4) + "|",
    ]
    for (weights, kv), by_grid in verdicts(runs).items():
        cells = " | ".join(f"{by_grid[grid]:.4f}" if grid in by_grid else "–" for grid in _GRIDS)
        stored = runs.get(Setting(STORED, "native", weights, kv).name)
        top = "–" if stored is None else f"{stored['top1']:.1%}"
        answer = "yes" if max(by_grid.values()) <= BOUND else "**no**"
        lines.append(f"| {weights} | {kv} | {cells} | {top} | {answer} |")
    return "\n".join(lines) + "\n"
