"""From runs to medians, and from medians to what the targets ask."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from bench.contestants import Contestant, Entry, Kind
from bench.journal import Run

Medians = Mapping[str, Mapping[str, "Cell"]]
"""By workload, then by contestant."""


@dataclass(frozen=True)
class Cell:
    """One engine on one workload: each metric's median over its clean runs, or over all where none was clean."""

    values: dict[str, float]
    num_runs: int
    num_dirty: int
    """If it equals `num_runs`, the medians are over dirty runs."""


def medians(runs: Iterable[Run]) -> Medians:
    """The table of all runs that gave a result."""
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        if not run.error:
            groups.setdefault(run.workload, {}).setdefault(run.contestant, []).append(run)
    return {
        workload: {name: _cell(cell_runs) for name, cell_runs in by_name.items()}
        for workload, by_name in groups.items()
    }


def _cell(runs: list[Run]) -> Cell:
    counted = [run for run in runs if not run.is_dirty] or runs
    names = counted[0].result.keys()
    values = {name: statistics.median(run.result[name] for run in counted if name in run.result) for name in names}
    return Cell(values, len(runs), sum(run.is_dirty for run in runs))


def best(
    table: Medians, workload: str, metric: str, among: Iterable[Contestant], *, lowest: bool = False
) -> tuple[str, float] | None:
    """Name and value of the best of some contestants; None if none of them was measured."""
    cells = table.get(workload, {})
    found = [(cells[one.name].values[metric], one.name) for one in among if one.name in cells]
    if not found:
        return None
    value, name = min(found) if lowest else max(found)
    return name, value


@dataclass(frozen=True)
class Target:
    """A bound for our best contestant of an entry and kind."""

    text: str
    workload: str
    metric: str
    entry: Entry
    kind: Kind
    bound: float
    lowest: bool = False
    """Whether a low value is a good one."""
    against: Literal["best peer", "transformers one by one", "bare engine", "itself"] = "best peer"
    """`itself`: the bound is on the value; else on its ratio to another's, or on what the queue adds to a latency."""


@dataclass(frozen=True)
class Verdict:
    """The result for a target; `value` is a ratio, a difference, or our value itself."""

    target: Target
    ours: str
    our_value: float
    other: str
    other_value: float | None
    value: float

    @property
    def is_met(self) -> bool:
        """Whether the bound holds."""
        return self.value <= self.target.bound if self.target.lowest else self.value >= self.target.bound


def _for_both(name: str, workload: str, metric: str, entry: Entry, *rest: Any) -> tuple[Target, Target]:
    """One target for bfloat16, and the same for the best quantized setting."""
    one, other = (Target(f"{name}, {kind}", workload, metric, entry, kind, *rest) for kind in get_args(Kind))
    return one, other


TARGETS = (
    Target("offline mix in process, bf16", "mix", "tokens_per_s", "process", "bf16", 1.8),
    Target("offline mix in process, quantized", "mix", "tokens_per_s", "process", "quantized", 3.0),
    Target("offline mix through HTTP, bf16", "mix", "tokens_per_s", "http", "bf16", 1.5),
    Target("offline mix through HTTP, quantized", "mix", "tokens_per_s", "http", "quantized", 2.2),
    Target("single stream ITL, bf16", "single", "itl_mean_ms", "process", "bf16", 0.75, lowest=True),
    Target("single stream ITL, quantized", "single", "itl_mean_ms", "process", "quantized", 0.4, lowest=True),
    *_for_both("single stream TTFT, HTTP", "single", "ttft_p50_ms", "http", 15, True, "itself"),
    *_for_both("Poisson TTFT p99, HTTP", "poisson", "ttft_p99_ms", "http", 100, True, "itself"),
    *_for_both("Poisson ITL p99, HTTP", "poisson", "itl_p99_ms", "http", 40, True, "itself"),
    Target("process start to ready, s", "startup", "ready_s", "http", "bf16", 3, True, "itself"),
    Target("peak RSS of the mix, MiB", "mix", "rss_peak_mib", "http", "bf16", 800, True, "itself"),
    *_for_both("mix ÷ transformers", "mix", "tokens_per_s", "process", 60, False, "transformers one by one"),
    *_for_both("through Redis ÷ bare engine", "mix", "tokens_per_s", "queue", 0.97, False, "bare engine"),
    *_for_both("TTFT that Redis adds, ms", "single", "ttft_p50_ms", "queue", 2, True, "bare engine"),
)


def verdicts(table: Medians, contestants: Iterable[Contestant]) -> list[Verdict]:
    """Each target that both sides were measured for."""
    all_contestants = list(contestants)
    return [found for target in TARGETS if (found := _verdict(target, table, all_contestants)) is not None]


def _verdict(target: Target, table: Medians, all_contestants: list[Contestant]) -> Verdict | None:
    ours = best(
        table,
        target.workload,
        target.metric,
        (one for one in all_contestants if one.is_ours and (one.entry, one.kind) == (target.entry, target.kind)),
        lowest=target.lowest,
    )
    if ours is None:
        return None
    if target.against == "itself":
        return Verdict(target, *ours, "", None, ours[1])
    other = best(
        table, target.workload, target.metric, filter(_opponent(target, ours[0]), all_contestants), lowest=target.lowest
    )
    if other is None:
        return None
    is_difference = target.against == "bare engine" and target.lowest
    return Verdict(target, *ours, *other, ours[1] - other[1] if is_difference else ours[1] / other[1])


def _opponent(target: Target, ours: str) -> Callable[[Contestant], bool]:
    if target.against == "best peer":
        # A quantized setting must be faster than the best peer of any kind.
        return lambda one: (
            not one.is_ours and one.entry == target.entry and (one.kind == "bf16" or target.kind == "quantized")
        )
    if target.against == "bare engine":
        return lambda one: one.name == ours.replace("penstock-queue", "penstock")
    return lambda one: one.name == target.against
