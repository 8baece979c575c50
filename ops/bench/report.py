"""Results as JSON and as a table."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

MAX_FOREIGN_CPU = 0.05
METRICS = ("tokens_per_s", "ttft_ms", "itl_ms")

Runs = dict[str, list[dict[str, Any]]]


def medians(runs: Runs) -> dict[str, dict[str, float]]:
    """Per engine and workload the median of each metric over its clean runs, or over all when none was clean."""
    table = {}
    for name, results in runs.items():
        clean = [r for r in results if r["foreign_cpu"] < MAX_FOREIGN_CPU] or results
        table[name] = {metric: statistics.median(r[metric] for r in clean) for metric in METRICS}
        table[name]["dirty_runs"] = sum(r["foreign_cpu"] >= MAX_FOREIGN_CPU for r in results)
        table[name]["runs"] = len(results)
    return table


def ratios(table: dict[str, dict[str, float]]) -> dict[str, float]:
    """What the figures mean, as ratios within one run."""

    def tokens(name: str) -> float:
        return table[name]["tokens_per_s"]

    found = {}
    if "queue mix" in table and "engine mix" in table:
        found["through Redis ÷ bare engine, tokens/s"] = tokens("queue mix") / tokens("engine mix")
        found["added TTFT through Redis, one stream, ms"] = (
            table["queue single"]["ttft_ms"] - table["engine single"]["ttft_ms"]
        )
    if "transformers mix" in table:
        found["64 requests through Redis ÷ transformers one by one"] = tokens("queue mix") / tokens("transformers mix")
    return found


def markdown(machine: dict[str, Any], table: dict[str, dict[str, float]], command: str) -> str:
    """The table that goes beside the JSON."""
    lines = [
        f"# Bench of {machine['date']}",
        "",
        f"`{command}` on {machine['cpu']} ({machine['cores']} cores, {', '.join(machine['cpu_features'])}), "
        f"Python {machine['python']}, "
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        + ". Medians; a run during which other processes took 5 % of the CPU or more is dirty and left out "
        "unless all were.",
        "",
        "| engine, workload | output tokens/s | TTFT ms (median) | ITL ms (median) | runs (dirty) |",
        "|---|---|---|---|---|",
    ]
    for name, row in table.items():
        lines.append(
            f"| {name} | {row['tokens_per_s']:.0f} | {row['ttft_ms']:.0f} | {row['itl_ms']:.1f} "
            f"| {row['runs']:.0f} ({row['dirty_runs']:.0f}) |"
        )
    lines += ["", *(f"- {text}: {value:.2f}" for text, value in ratios(table).items()), ""]
    return "\n".join(lines)


def write(folder: Path, name: str, machine: dict[str, Any], runs: Runs, command: str) -> str:
    """Writes `<name>.json` and `<name>.md`; answers the table."""
    folder.mkdir(parents=True, exist_ok=True)
    table = medians(runs)
    content = {"machine": machine, "command": command, "runs": runs, "medians": table, "ratios": ratios(table)}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    text = markdown(machine, table, command)
    (folder / f"{name}.md").write_text(text)
    return text
