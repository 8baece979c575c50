"""What each policy does to the same loads: `python -m bench.policies` simulates and writes results/policies.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import get_args

from bench.policies.loads import DESCRIPTIONS, LOADS
from bench.policies.node import CLASSES, SimulationResult, simulate
from bench.report import raw_folder, write_raw
from penstock.queue.policy import PolicyName

RESULTS = Path(__file__).parents[1] / "results"
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
SEEDS = range(5)
MEASURES = ("ttft_p50", "ttft_p99", "completion_p99")
SHOWN: tuple[PolicyName, ...] = ("fcfs", "sjf", "fair")
"""The policies on the page. `round_robin` and `priority` are near one of these; policies.json has all of it."""
LOADS_SHOWN = ("classes", "tenants", "flood")
HEADER = "| policy | class | TTFT p50 | TTFT p99 | completion p99 | Jain |"
RULE = "|" + "---|" * 6
COMMAND = "PYTHONPATH=ops PYTHONSAFEPATH=1 .venv/bin/python -m bench.policies"
Runs = dict[str, dict[PolicyName, list[SimulationResult]]]
"""By load and policy, one for each seed."""


def main() -> None:
    """Simulates every load under every policy."""
    runs: Runs = {
        load: {name: [simulate(name, make(seed)) for seed in SEEDS] for name in POLICIES}
        for load, make in LOADS.items()
    }
    (RESULTS / "policies.md").write_text("\n".join(_lines(runs)) + "\n", encoding="utf-8")
    plain = {load: {name: [asdict(run) for run in of] for name, of in by.items()} for load, by in runs.items()}
    write_raw("policies", plain)
    _plot(runs)


def _lines(runs: Runs) -> Iterator[str]:
    yield "# Policies on the same loads"
    yield ""
    yield f"Simulated, means over {len(SEEDS)} seeds, times in ms. `{COMMAND}`"
    for load in LOADS_SHOWN:
        by_policy = runs[load]
        yield from ("", f"## {load}", "", DESCRIPTIONS[load] + ".", "", HEADER, RULE)
        for policy in SHOWN:
            results = by_policy[policy]
            yield from (_row(policy, name, results) for name in CLASSES if name in results[0].ttft_p50)
    yield ""
    yield "Jain: index of the tenants' KV-token-seconds until the first of them has no work left; 1 is even."


def _row(policy: PolicyName, name: str, results: list[SimulationResult]) -> str:
    times = [mean(getattr(run, measure)[name] for run in results) for measure in MEASURES]
    cells = [policy, name, *(f"{time:.0f}" for time in times), f"{mean(run.jain for run in results):.2f}"]
    return "| " + " | ".join(cells) + " |"


def _plot(runs: Runs) -> None:
    """Needs the `bench` extra."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = (
        ("lengths", "mean completion, s", lambda run: run.mean_completion / 1000),
        ("classes", "interactive TTFT p99, s", lambda run: run.ttft_p99["interactive"] / 1000),
        ("tenants", "Jain index of KV-seconds", lambda run: run.jain),
    )
    figure = Figure(figsize=(12, 2.2), layout="constrained")
    for axes, (load, title, measure) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        values = [mean(measure(run) for run in runs[load][name]) for name in POLICIES]
        axes.bar_label(axes.barh(POLICIES, values), fmt="%.3g", padding=2, fontsize=7)
        axes.set_title(f"{load}: {title}", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.margins(x=0.15)
    # Without a date and with fixed ids, equal values give equal files.
    with rc_context({"svg.hashsalt": "penstock"}):
        figure.savefig(raw_folder() / "policies.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
