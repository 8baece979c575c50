"""`python -m bench.pairs OLD_PYTHON`: two versions of penstock over HTTP, by turns, on the mix and on single streams.

OLD_PYTHON is the interpreter of another clone's virtual environment. Each run is a process of its own; which version
goes first alternates from pair to pair. A pair in which other processes used much of the CPU is run again. Printed are
the median of new ÷ old and its 95 % interval, by bootstrap: tokens per second, so more than 1 is faster.

Each run converts the weights into memory of its own. A file of converted weights lies in the page cache as it was first
written: reads of two such files differ in speed by up to 10 %, and each version would keep a file of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from dataclasses import replace

from bench import peers
from bench.campaign import Campaign
from bench.contestants import CONTESTANTS, Contestant
from bench.journal import Journal, Run, journal_path

METRIC = "tokens_per_s"
NUM_RESAMPLES = 10_000
EPHEMERAL = "--ephemeral"
MAX_TRIES = 4


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="bench.pairs", description=__doc__)
    parser.add_argument("old", help="the interpreter of the old version's virtual environment")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--engine", default="penstock-http int8, KV int8", choices=list(CONTESTANTS), metavar="NAME")
    parser.add_argument("--workloads", nargs="+", default=["mix", "single"])
    parser.add_argument("--campaign", default="pairs", help="the journal, which an aborted run goes on with")
    return parser.parse_args()


def versions(engine: str, old_python: str) -> dict[str, Contestant]:
    """The same server from two environments. The client is this environment's in both cases."""
    new = CONTESTANTS[engine]
    # An older release has no such option: its queue is in memory anyway.
    left_out = () if _has_option(old_python, EPHEMERAL) else (EPHEMERAL,)
    command = [
        old_python if word == sys.executable else word for word in new.options["command"] if word not in left_out
    ]
    old_options = new.options | {"command": command}
    return {"old": replace(new, name="old", options=old_options), "new": replace(new, name="new")}


def _has_option(python: str, option: str) -> bool:
    shown = subprocess.run([python, "-m", "penstock", "serve", "--help"], check=False, capture_output=True).stdout
    return option in shown.decode()


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median by bootstrap (Efron 1979)."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(NUM_RESAMPLES))
    return medians[round(0.025 * NUM_RESAMPLES)], medians[round(0.975 * NUM_RESAMPLES) - 1]


def clean_pair(campaign: Campaign, journal: Journal, pair: int, workload: str, order: list[Contestant]) -> bool:
    """Run a pair until neither of its runs is dirty. Return whether that was achieved."""
    for _ in range(MAX_TRIES):
        runs: list[Run] = [campaign.run_once(one, workload, pair) for one in order]
        for run in runs:
            if run.error:
                sys.exit(f"{run.contestant} failed: {run.error}")
        if not any(run.is_dirty for run in runs):
            for run in runs:
                journal.add(run)
            return True
        print(
            f"pair {pair + 1} of {workload} again: others used {max(run.foreign_cpu for run in runs):.0%}", flush=True
        )
    return False


def main() -> None:
    """Run what the journal lacks, then print the ratios."""
    from penstock.cli.demo_model import demo_model

    options = parse()
    os.environ["PENSTOCK_NODE_WEIGHT_CACHE"] = "false"
    journal = Journal(journal_path(options.campaign))
    contestants = versions(options.engine, options.old)
    campaign = Campaign(journal, str(demo_model()), contestants.values())
    for pair in range(options.pairs):
        for workload in options.workloads:
            if not journal.tries("new", workload, pair):
                order = list(contestants.values())[:: 1 if pair % 2 else -1]
                clean_pair(campaign, journal, pair, workload, order)
    for workload in options.workloads:
        results = {(run.contestant, run.repeat): run.result[METRIC] for run in journal.runs if run.workload == workload}
        ratios = [results["new", i] / results["old", i] for i in range(options.pairs) if ("new", i) in results]
        low, high = interval(ratios)
        old, new = (
            statistics.median(value for (name, _), value in results.items() if name == which)
            for which in ("old", "new")
        )
        print(
            f"{workload}: {len(ratios)} pairs, new ÷ old {statistics.median(ratios):.3f} "
            f"[{low:.3f}, {high:.3f}]; medians {old:.1f} and {new:.1f} tokens/s"
        )


if __name__ == "__main__":
    peers.BUILD.mkdir(exist_ok=True)
    main()
