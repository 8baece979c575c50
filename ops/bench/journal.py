"""All runs of a campaign, one JSON line each, so that an aborted campaign can resume."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench import peers

MAX_FOREIGN_CPU = 0.05


def journal_path(campaign: str, shape: str | None = None) -> Path:
    """Where a campaign's runs are kept; those of a shape have a file of their own."""
    return peers.BUILD / "bench" / f"{campaign}{f'-{shape}' if shape else ''}.jsonl"


@dataclass(frozen=True)
class Run:
    """One engine on one workload, once."""

    contestant: str
    workload: str
    repeat: int
    revision: str
    command: str
    result: dict[str, float] = field(default_factory=dict)
    foreign_cpu: float = 0.0
    error: str = ""

    @property
    def is_dirty(self) -> bool:
        """Whether other processes used so much CPU that the measurements are unreliable."""
        return self.foreign_cpu >= MAX_FOREIGN_CPU


class Journal:
    """A file of runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.runs = [Run(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def add(self, run: Run) -> None:
        """Keeps a run."""
        self.runs.append(run)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")

    def forget(self, contestants: set[str], workloads: set[str]) -> None:
        """Drops the runs of some at some workloads, for which their code or setting has changed."""
        self.runs = [run for run in self.runs if run.contestant not in contestants or run.workload not in workloads]
        if self._path.exists():
            self._path.write_text("".join(json.dumps(asdict(run)) + "\n" for run in self.runs))

    def tries(self, contestant: str, workload: str, repeat: int) -> list[Run]:
        """What was run for one cell of the table; failures of an earlier start may be tried again."""
        key = (contestant, workload, repeat)
        return [run for run in self.runs if (run.contestant, run.workload, run.repeat) == key and not run.error]
