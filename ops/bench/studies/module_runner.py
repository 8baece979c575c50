"""`PYTHONPATH=ops python -m bench.studies.module_runner`: the runner `transformers` beside torch and transformers.

The demo model in bfloat16 and the mix of 64 requests, by turns, each run in a process of its own: our runner of
transformers' modules, our torch runner of families, and transformers' own continuous batching.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench import machine, weights
from bench.campaign import Campaign, summary
from bench.contestants import CONTESTANTS, NUM_CORES, Contestant
from bench.journal import Journal, Run, journal_path

RESULTS = Path(__file__).parents[1] / "results"
WORKLOAD, METRIC = "mix", "tokens_per_s"
MODULES, FAMILIES, THEIRS = "runner transformers", "runner torch", "transformers continuous"
GOALS = {FAMILIES: 0.8, THEIRS: 2.0}
"""What the tokens per second of our runner of modules must reach of another's."""
HEAD = f"""# The runner of transformers' modules, {{date}}

`PYTHONPATH=ops python -m bench.studies.module_runner` on {{cpu}}, {NUM_CORES} cores: the demo model in bfloat16, 64
requests at once (prompts of 16 to 512 tokens, outputs of 16 to 256), {{rounds}} rounds by turns. A ratio is the median
of the rounds'. Other processes took at most {{foreign:.0%}} of the machine.

| {MODULES} ÷ | its tokens/s | {MODULES}, tokens/s | ratio | goal |
|---|---|---|---|---|
"""


def _ours(name: str) -> Contestant:
    options = {"runner": name.removeprefix("runner "), "dtype": "bfloat16", "kv_cache_dtype": "auto"}
    return Contestant(name, "penstock", "process", "hf-bf16", workloads=(WORKLOAD,), options=options)


ENGINES = (_ours(MODULES), _ours(FAMILIES), replace(CONTESTANTS[THEIRS], workloads=(WORKLOAD,)))


def main() -> None:
    """Measure, and print the ratios."""
    from penstock.cli.demo_model import demo_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[one.name for one in ENGINES], metavar="ENGINE")
    parser.add_argument("--write", action="store_true", help="write results/module_runner.md")
    args = parser.parse_args()
    model, chosen = str(demo_model()), [one for one in ENGINES if one.name in args.only]
    for failure in weights.make_all(model, {"hf-bf16"}):
        sys.exit(f"not made: {failure}")
    campaign, runs = Campaign(Journal(journal_path("module_runner")), model, chosen), list[Run]()
    for turn in range(args.rounds):
        for one in chosen[:: 1 if turn % 2 == 0 else -1]:
            runs.append(campaign.run_once(one, WORKLOAD, turn))
            print(f"round {turn + 1}, {one.name}: {summary(runs[-1])}", file=sys.stderr, flush=True)
            if runs[-1].error:
                sys.exit(1)
    facts = machine.describe() | {"rounds": args.rounds, "foreign": max(run.foreign_cpu for run in runs)}
    text = HEAD.format(**facts) + "".join(_lines(runs))
    print(text)
    if args.write:
        (RESULTS / "module_runner.md").write_text(text)


def _lines(runs: list[Run]) -> Iterator[str]:
    speeds: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: run.repeat):
        speeds.setdefault(run.contestant, []).append(run.result[METRIC])
    ours = speeds.get(MODULES, [])
    for name, goal in GOALS.items():
        if ours and name in speeds:
            ratio = statistics.median(mine / its for mine, its in zip(ours, speeds[name], strict=True))
            both = f"{statistics.median(speeds[name]):.1f} | {statistics.median(ours):.1f}"
            yield f"| {name} | {both} | {ratio:.2f} | ≥ {goal} {'met' if ratio >= goal else 'missed'} |\n"


if __name__ == "__main__":
    main()
