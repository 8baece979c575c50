"""Results as tables under ops/bench/results/, single runs under build/: offline, latency, startup, memory, targets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import peers
from bench.contestants import Contestant
from bench.journal import Run
from bench.verdicts import Cell, Medians, Verdict, medians, verdicts

Columns = dict[str, tuple[str, str]]
"""A metric's heading and format."""

_SPEED: Columns = {
    "tokens_per_s": ("output tokens/s", ".0f"),
    "ttft_p50_ms": ("TTFT p50, ms", ".0f"),
    "itl_mean_ms": ("ITL mean, ms", ".1f"),
}
_LATENCY: Columns = {
    "ttft_p50_ms": ("TTFT p50, ms", ".1f"),
    "ttft_p90_ms": ("p90", ".1f"),
    "ttft_p99_ms": ("p99", ".1f"),
    "itl_mean_ms": ("ITL mean, ms", ".2f"),
    "itl_p50_ms": ("p50", ".2f"),
    "itl_p90_ms": ("p90", ".2f"),
    "itl_p99_ms": ("p99", ".2f"),
    "goodput": ("goodput", ".2f"),
    "tokens_per_s": ("tokens/s", ".0f"),
}
_START: Columns = {"ready_s": ("start to ready, s", ".2f"), "first_token_s": ("start to first token, s", ".2f")}
_MEMORY: Columns = {"rss_load_mib": ("RSS loaded, MiB", ".0f"), "rss_peak_mib": ("RSS peak, MiB", ".0f")}
_GROWTH: Columns = {
    "rss_2000_mib": ("RSS after 2,000 requests, MiB", ".1f"),
    "rss_10000_mib": ("after 10,000", ".1f"),
    "tokens_per_s": ("tokens/s", ".0f"),
}

REPORTS: dict[str, dict[str, Columns]] = {
    "offline": {"mix": _SPEED, "prefix": _SPEED, "long": _SPEED},
    "latency": {"single": _LATENCY, "poisson": _LATENCY},
    "startup": {"startup": _START},
    "memory": {"mix": _MEMORY, "tiny": _GROWTH},
}
DESCRIPTIONS = {
    "mix": "64 requests at once, prompts of 16–512 and outputs of 16–256 tokens, a third share 128 tokens",
    "prefix": "32 requests at once that share a prefix of 1,024 tokens, 32 tokens out",
    "long": "one prompt of 8,000 tokens, 64 tokens out",
    "single": "one stream at a time, 32 → 128",
    "poisson": "120 requests like the mix's, 4 a second on average; goodput: TTFT ≤ 200 ms and mean ITL ≤ 50 ms",
    "startup": "from the start of the process, caches warm; one prompt of 32 tokens",
    "larger-1b": "one stream at a time, 32 → 64; a prompt of 512 tokens; 16 requests at once, 64 → 48",
    "larger-3b": "one stream, 32 → 64; a prompt of 512 tokens; 16 requests at once, 32 → 24",
    "load": "the first load of a file: no packed weights are cached, the file is in memory",
    "tiny": "10,000 requests of 8 → 2, 64 at a time",
}


@dataclass(frozen=True)
class Scene:
    """The machine and settings of the runs, which all reports show."""

    machine: dict[str, Any]
    command: str
    peers: dict[str, str]
    missing: dict[str, str]


def write(folder: Path, scene: Scene, runs: list[Run], contestants: Iterable[Contestant]) -> str:
    """Writes every report that there are runs for; answers the table of targets."""
    folder.mkdir(parents=True, exist_ok=True)
    table = medians(runs)
    for name, workloads in REPORTS.items():
        if not any(workload in table for workload in workloads):
            continue
        chosen = [run for run in runs if run.workload in workloads]
        content = asdict(scene) | {
            "medians": {w: {n: asdict(cell) for n, cell in table.get(w, {}).items()} for w in workloads},
            "runs": [asdict(run) for run in chosen],
        }
        write_raw(name, content)
        sections = [section(workload, columns, table) for workload, columns in workloads.items() if workload in table]
        (folder / f"{name}.md").write_text("\n".join([head(name, scene, chosen), *sections]))
    found = verdicts(table, contestants)
    text = "\n".join([head("targets", scene, runs), targets_table(found), not_measured(scene, runs)])
    (folder / "targets.md").write_text(text)
    write_raw("targets", [asdict(one) | {"is_met": one.is_met} for one in found])
    return text


def raw_folder() -> Path:
    """Return the folder for single runs and plots. It is no part of the repository."""
    folder = peers.BUILD / "bench" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_raw(name: str, content: Any) -> None:
    """Write single runs as JSON."""
    (raw_folder() / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def head(name: str, scene: Scene, runs: list[Run]) -> str:
    """Title, machine, versions."""
    machine = scene.machine
    revisions = ", ".join(sorted({run.revision for run in runs}))
    return "\n".join(
        [
            f"# Bench: {name}, {machine['date']}",
            "",
            f"`{scene.command}` on {machine['cores']} cores of {machine['cpu']}, {revisions}; "
            f"{', '.join(scene.peers.values()) or 'no peers installed'}. Medians of runs by turns.",
            "",
        ]
    )


def section(workload: str, columns: Columns, table: Medians) -> str:
    """One workload's table; the best first."""
    cells = table[workload]
    first = next(iter(columns))
    ordered = sorted(cells, key=lambda name: cells[name].values.get(first, 0.0), reverse=first == "tokens_per_s")
    return "\n".join(
        [
            f"## {workload}: {DESCRIPTIONS[workload]}",
            "",
            "| engine | " + " | ".join(heading for heading, _ in columns.values()) + " |",
            "|---" * (len(columns) + 1) + "|",
            *(_row(name, cells[name], columns) for name in ordered),
            "",
        ]
    )


def _row(name: str, cell: Cell, columns: Columns) -> str:
    values = [format(cell.values[m], spec) if m in cell.values else "–" for m, (_, spec) in columns.items()]
    return f"| {name} | {' | '.join(values)} |"


def targets_table(found: list[Verdict]) -> str:
    """Return ours beside the best peer and the goal. A missed goal is bold."""
    lines = ["| target | ours | against | result | goal |", "|---|---|---|---|---|"]
    for one in found:
        against = "" if one.other_value is None else f"{one.other_value:.2f} ({one.other})"
        lines.append(
            f"| {one.target.text} | {one.our_value:.2f} | {against} | {one.value:.2f} "
            f"| {goal_of(one.target.bound, lowest=one.target.lowest, is_met=one.is_met)} |"
        )
    return "\n".join([*lines, ""])


def goal_of(bound: float, *, lowest: bool, is_met: bool) -> str:
    """Return a goal as text, bold if it is missed."""
    goal = f"{'≤' if lowest else '≥'} {bound:g}"
    return goal if is_met else f"**{goal}**"


def not_measured(scene: Scene, runs: list[Run]) -> str:
    """List what was skipped and what failed."""
    worked = {(run.contestant, run.workload) for run in runs if not run.error}
    failed = {(r.contestant, r.workload): r.error for r in runs if r.error and (r.contestant, r.workload) not in worked}
    lines = [f"- {name}: skipped, {why}" for name, why in scene.missing.items()]
    lines += [f"- {name}, {workload}: failed, {why}" for (name, workload), why in failed.items()]
    return "\n".join(["Not measured:", "", *lines, ""]) if lines else ""
