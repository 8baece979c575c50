"""Results of fault campaigns: stored in ops/bench/results/faults.json, shown in faults.md beside it."""

from __future__ import annotations

import json
import platform
import re
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parents[3] / "ops" / "bench" / "results"
_HEAD = """# Faults

Made by `make faults`, `make soak`, `make backlog`, `make batches`, `make webhooks`, `make ranks`, `make failovers`,
`make deaths`, `make kills` and `make upgrades`, on two cores. A row is here only if nothing was violated: every stream
and log equal to an undisturbed run's, one end per job, every key in agreement with the jobs' records. `faults.json` has
more columns and rows.
"""
_ONLY_STORED = re.compile(
    "machine.*|too late|mean place.*|p99 s|steepest.*|caller.*|slow in.*|most MiB.*|rewrite.*|bytes an? .*|chats|"
    "bytes a job|"
    "Redis MiB.*|scheduled.*|left the path.*|longest gap, median s|later than.*|ranks gone.*|after a stop.*|cancel: .*|"
    "response .*|key revoked.*|revocations.*|queued jobs, .*|streams over.*|promotion.*|replica behind.*|oldest.*|"
    "all repaired.*|ends repeated.*|by clients.*|given back|processes.*|packed.*|refused at first|minutes|refused|run|"
    "jobs submitted again|what was killed|open at once|given to.*"
)
"""Columns that the page leaves out."""
_ROWS_ONLY_STORED = re.compile(r".*, Redis [78].*|.*replica's clock.*")
"""Rows that the page leaves out: the same with other servers, and with jumps of the clock."""

Measurement = str | int | float


def record(section: str, row: str, measurements: dict[str, Measurement]) -> None:
    """Replace one row of one section's table."""
    path = RESULTS / "faults.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    stamp = {"run": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": f"{platform.machine()}, {platform.system()}"}
    known.setdefault(section, {})[row] = measurements | stamp
    path.write_text(json.dumps(known, indent=2) + "\n")
    (RESULTS / "faults.md").write_text(_page(known))


def _page(known: dict[str, dict[str, dict[str, Measurement]]]) -> str:
    return _HEAD + "".join(_table(*item) for item in known.items())


def quantile(values: list[float], share: float) -> float:
    """Return the value that this share of values does not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _table(section: str, rows: dict[str, dict[str, Measurement]]) -> str:
    rows = {row: measurements for row, measurements in rows.items() if not _ROWS_ONLY_STORED.fullmatch(row)}
    found = dict.fromkeys(name for measurements in rows.values() for name in measurements)
    names = [name for name in found if not _ONLY_STORED.fullmatch(name)]
    lines = [["", *names]] + [
        [row, *(_shown(measurements.get(name, "")) for name in names)] for row, measurements in rows.items()
    ]
    head, *others = (f"| {' | '.join(line)} |\n" for line in lines)
    table = f"{head}{'|---' * len(lines[0])}|\n{''.join(others)}"
    runs = sorted({str(measurements["run"]) for measurements in rows.values()})
    return f"\n## {section}\n\nRun {' to '.join(dict.fromkeys((runs[0], runs[-1])))}.\n\n{table}"


def _shown(value: Measurement) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
