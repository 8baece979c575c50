"""`python -m bench.pairs OLD_PYTHON`: two versions of penstock over HTTP, by turns, on the mix and on single streams.

OLD_PYTHON is the interpreter of another clone's virtual environment. Each run is a process of its own; which version
goes first alternates from pair to pair. A pair in which other processes used much of the CPU is run again. Printed are
the median of new ÷ old and its 95 % interval, by bootstrap: tokens per second, so more than 1 is faster.

`--side-by-side` starts both servers of a pair at once and gives them the work by turns of seconds: single streams, or a
quarter of the mix. The speed of a virtual machine changes within minutes, so this finds smaller differences than whole
runs do.

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from bench import peers, weights
from bench.campaign import LOG, Campaign
from bench.child import Spec
from bench.contestants import CONTESTANTS, Contestant
from bench.engines.http_server import open_session
from bench.journal import Journal, Run, journal_path
from bench.machine import ForeignCpu, revision
from bench.stopwatch import Stopwatch
from bench.workload import WARM_UP, Workload, alike, offline_mix

METRIC = "tokens_per_s"
NUM_RESAMPLES = 10_000
EPHEMERAL = "--ephemeral"
MAX_TRIES = 4
SIDE_BY_SIDE = ", side by side"
"""The end of a workload's name in the journal."""
NUM_TURNS = 8
NUM_STREAMS_PER_TURN = 2
NUM_MIXED_PER_TURN = 16
OWN_REDIS = """
import sys
from penstock.runtime.embedded_redis import EmbeddedRedis
with EmbeddedRedis() as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="bench.pairs", description=__doc__)
    parser.add_argument("old", help="the interpreter of the old version's virtual environment")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--engine", default="penstock-http int8, KV int8", choices=list(CONTESTANTS), metavar="NAME")
    parser.add_argument("--workloads", nargs="+", default=["mix", "single"])
    parser.add_argument("--side-by-side", action="store_true", help="by turns between running servers")
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


@contextmanager
def redis_of(python: str) -> Iterator[str]:
    """The URL of a Redis server of the kind that a version embeds."""
    command = [python, "-c", OWN_REDIS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        if server.stdin is None or server.stdout is None:
            raise RuntimeError("the process has no pipes")
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()


def turn_of(workload: str, turn: int) -> Workload:
    """A turn of seconds."""
    if workload.startswith("mix"):
        return Workload(offline_mix(NUM_MIXED_PER_TURN, seed=turn))
    return Workload(alike(NUM_STREAMS_PER_TURN, 32, 128, seed=turn), max_in_flight=1)


def by_turns(contestants: dict[str, Contestant], model: str, pair: int, workload_name: str) -> list[Run]:
    """Run both servers at once. Return each one's median speed, and the median of the turns' ratios."""
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    with ExitStack() as stack:
        sessions = {}
        for name, one in contestants.items():
            url = stack.enter_context(redis_of(one.options["command"][0]))
            options = one.options | {"env": one.options["env"] | {"PENSTOCK_REDIS_URL": url}, "log": str(LOG)}
            spec = Spec("single", str(weights.path(one.weights, model)), options)
            sessions[name] = stack.enter_context(open_session(spec))
            sessions[name].run(WARM_UP, Stopwatch(WARM_UP))
        foreign = ForeignCpu()
        for turn in range(NUM_TURNS):
            workload = turn_of(workload_name, turn)
            for name in list(sessions)[:: 1 if turn % 2 else -1]:
                watch = Stopwatch(workload)
                sessions[name].run(workload, watch)
                speeds[name].append(watch.measured()[METRIC])
        share = foreign.share()
    ratio = statistics.median(new / old for new, old in zip(speeds["new"], speeds["old"], strict=True))
    results = {name: {METRIC: statistics.median(found), "ratio": ratio} for name, found in speeds.items()}
    return [Run(name, workload_name, pair, revision(), "", found, share) for name, found in results.items()]


def clean_pair(
    campaign: Campaign, model: str, pair: int, workload: str, contestants: dict[str, Contestant]
) -> list[Run]:
    """Run a pair until neither of its runs is dirty. Return nothing if that is not achieved."""
    order = list(contestants.values())[:: 1 if pair % 2 else -1]
    for _ in range(MAX_TRIES):
        if workload.endswith(SIDE_BY_SIDE):
            runs = by_turns(contestants, model, pair, workload)
        else:
            runs = [campaign.run_once(one, workload, pair) for one in order]
        for run in runs:
            if run.error:
                sys.exit(f"{run.contestant} failed: {run.error}")
        if not any(run.is_dirty for run in runs):
            return runs
        print(
            f"pair {pair + 1} of {workload} again: others used {max(run.foreign_cpu for run in runs):.0%}", flush=True
        )
    return []


def ratios_of(journal: Journal, workload: str) -> list[float]:
    """New ÷ old of each pair."""
    found = {(run.contestant, run.repeat): run.result for run in journal.runs if run.workload == workload}
    news = {pair: result for (name, pair), result in found.items() if name == "new"}
    return [new.get("ratio", new[METRIC] / found["old", pair][METRIC]) for pair, new in news.items()]


def main() -> None:
    """Run what the journal lacks, then print the ratios."""
    from penstock.cli.demo_model import demo_model

    options = parse()
    os.environ["PENSTOCK_NODE_WEIGHT_CACHE"] = "false"
    # Otherwise both interpreters would import the modules of the current folder.
    os.environ["PYTHONSAFEPATH"] = "1"
    journal = Journal(journal_path(options.campaign))
    contestants = versions(options.engine, options.old)
    model = str(demo_model())
    campaign = Campaign(journal, model, contestants.values())
    workloads = [name + (SIDE_BY_SIDE if options.side_by_side else "") for name in options.workloads]
    for pair in range(options.pairs):
        for workload in workloads:
            if not journal.tries("new", workload, pair):
                for run in clean_pair(campaign, model, pair, workload, contestants):
                    journal.add(run)
    for workload in workloads:
        if not (ratios := ratios_of(journal, workload)):
            sys.exit(f"{workload}: other processes used too much of the CPU in all pairs")
        low, high = interval(ratios)
        old, new = (
            statistics.median(run.result[METRIC] for run in journal.runs if (run.contestant, run.workload) == key)
            for key in (("old", workload), ("new", workload))
        )
        print(
            f"{workload}: {len(ratios)} pairs, new ÷ old {statistics.median(ratios):.3f} "
            f"[{low:.3f}, {high:.3f}]; medians {old:.1f} and {new:.1f} tokens/s"
        )


if __name__ == "__main__":
    peers.BUILD.mkdir(exist_ok=True)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    main()
