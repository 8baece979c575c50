"""Estimates of waits beside true waits: `python -m bench.studies.wait_estimates` writes results/wait_estimates.*.

Backlogs are replayed in virtual time (`wait_replay`). With `--real` the demo model computes a backlog of jobs too.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import time
from collections.abc import Sequence
from io import StringIO
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench import machine
from bench.queue_cost.processes import child
from bench.studies.wait_replay import NUM_SAMPLED, SAMPLE_S, SCENARIOS, ComparedWait, Replay
from penstock.cli.demo_model import demo_model
from penstock.contract.output import WaitEstimate
from penstock.producer.client import AsyncClient
from penstock.runtime.embedded_redis import EmbeddedRedis

RESULTS = Path(__file__).parents[1] / "results"
MAX_BINS = 80
"""Of a panel of the plot."""
MIN_WAIT_S = 10.0
"""Shorter true waits do not count."""
SEEDS = range(2)
STEPS_MEASURED_S = 3.0
"""Seconds after which the demo model's node has measured its steps and told so with a heartbeat."""
REAL_MAX_TOKENS = 512
REAL_SAMPLE_S, NUM_REAL_SAMPLED = 3.0, 16
TASKS = ("Say hello.", "Name three rivers.", "Explain what a queue is.", "Tell a story about a ship in a storm.")

HEAD = """# Estimated waits

`{command}` on {cores} cores of {cpu}, {date}, {revision}.

Every {sample:.0f} s the wait of {sampled} queued jobs is estimated. *Error*: the larger quotient of estimate and truth.
*Inside*: part of the waits between `estimated_wait_p10_ms` and `estimated_wait_p90_ms`, which are to hold 80 %. Only
true waits of at least {min_wait:.0f} s count, and only estimates from 30 s after a node joined or died. {seeds} replays
in virtual time, where steps take what a model of step times says, with noise.

| backlog | first minute: median error | p90 | inside | all: median error | p90 | inside |
|---|---|---|---|---|---|---|
"""


async def real_run(redis_url: str, num_jobs: int) -> list[ComparedWait]:
    """Submit a backlog of chats to the node, and compare the waits that its jobs' states showed with the true ones."""
    rng, found = random.Random(1), list[tuple[str, float, WaitEstimate]]()
    async with AsyncClient(redis_url) as client:
        start_s = time.time()
        waiting = set[str]()
        for _ in range(num_jobs):
            padding = "Please answer this. " * rng.randint(0, 20)
            messages = [{"role": "user", "content": padding + rng.choice(TASKS)}]
            job = await client.submit_unread(messages, max_tokens=REAL_MAX_TOKENS, seed=rng.randrange(1 << 30))
            waiting.add(job.job_id)
        submitted = list(waiting)
        while waiting:
            for job_id in rng.sample(sorted(waiting), min(len(waiting), NUM_REAL_SAMPLED)):
                status = await client.status(job_id)
                if status.queue_position is None or not status.queue_position.position:
                    waiting.discard(job_id)
                else:
                    found.append((job_id, time.time(), status.queue_position.wait))
            await asyncio.sleep(REAL_SAMPLE_S)
        ledgers = {job_id: (await client.status(job_id)).ledger for job_id in submitted}
    compared = []
    for job_id, at_s, wait in found:
        if wait.estimated_wait_ms is not None:
            value_s, *interval_s = (ms / 1000 for ms in wait if ms is not None)
            true_s = ledgers[job_id].taken_ms / 1000 - at_s
            compared.append(ComparedWait(at_s - start_s, 0.0, true_s, value_s, *interval_s))
    return compared


def measure_demo_model(num_jobs: int) -> list[ComparedWait]:
    """Run the demo model's node and a backlog for it."""
    with EmbeddedRedis() as server:
        settings = {"PENSTOCK_REDIS_URL": server.url, "PENSTOCK_NODE_PROGRESS": "json"}
        with child("penstock", "node", str(demo_model()), **settings):
            time.sleep(STEPS_MEASURED_S)
            return asyncio.run(real_run(server.url, num_jobs))


def counted(compared: Sequence[ComparedWait], changes_s: float = math.inf) -> list[ComparedWait]:
    """Return the estimates that count, as the report says."""
    far = [one for one in compared if one.true_s >= MIN_WAIT_S]
    return far if changes_s == math.inf else [one for one in far if one.at_s >= changes_s + 30]


def _cells(compared: Sequence[ComparedWait]) -> str:
    if not compared:
        return "– | – | –"
    errors = sorted(one.error for one in compared)
    inside = sum(one.is_inside for one in compared) / len(compared)
    return f"{median(errors):.2f} | {errors[len(errors) * 9 // 10]:.2f} | {inside:.0%}"


def row(name: str, compared: Sequence[ComparedWait], changes_s: float = math.inf, begins_s: float = 0.0) -> str:
    """Return a line of the table. The first minute of a backlog whose nodes change is the one after these 30 s.

    `begins_s`: when the pool got its first node. Before that no wait is known.
    """
    counting = counted(compared, changes_s)
    until_s = begins_s + 60 if changes_s == math.inf else changes_s + 90
    return f"| {name} | {_cells([one for one in counting if one.at_s < until_s])} | {_cells(counting)} |"


def plot(panels: dict[str, tuple[Sequence[ComparedWait], float]]) -> None:
    """Draw estimate ÷ truth over time: the median, and the middle 80 %. Needs the `bench` extra."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / 5)
    figure = Figure(figsize=(15, 2.3 * rows), layout="constrained")
    all_axes = [*figure.subplots(rows, 5, squeeze=False, sharey=True).flat]
    for axes, (name, (compared, changes_s)) in zip(all_axes, panels.items(), strict=False):
        far = [one for one in compared if one.true_s >= MIN_WAIT_S]
        width_s = SAMPLE_S * (1 + int(max(one.at_s for one in far) / SAMPLE_S / MAX_BINS))
        edges = [width_s * at for at in range(2 + int(max(one.at_s for one in far) / width_s))]
        bins = [sorted(one.wait_s / one.true_s for one in far if a <= one.at_s < b) for a, b in pairwise(edges)]
        known = [(edge, of_bin) for edge, of_bin in zip(edges, bins, strict=False) if of_bin]
        times = [edge + width_s / 2 for edge, _ in known]
        low, middle, high = ([of_bin[len(of_bin) * part // 10] for _, of_bin in known] for part in (1, 5, 9))
        axes.fill_between(times, low, high, color="#1f77b4", alpha=0.3, linewidth=0)
        axes.plot(times, middle, color="#1f77b4", linewidth=1.2)
        for bound, style in ((1.3, "--"), (1 / 1.3, "--"), (1.0, "-")):
            axes.axhline(bound, color="#b0b0b0", linewidth=0.8, linestyle=style)
        if changes_s < math.inf:
            axes.axvline(changes_s, color="#b0b0b0", linewidth=0.8)
        axes.set_yscale("log", base=2)
        axes.set_ylim(0.25, 4)
        axes.set_yticks([0.5, 1, 2], ["0.5", "1", "2"])
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=8)
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    figure.supxlabel("seconds since the backlog began", fontsize=9)
    figure.supylabel("estimate ÷ true wait", fontsize=9)
    with rc_context({"svg.hashsalt": "penstock"}):
        file = StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    # A tenth of a point is finer than a line is wide.
    lines = re.sub(r"(?m)^[ML] .*", lambda line: re.sub(r"\.(\d)\d+", r".\1", line[0]), file.getvalue())
    (RESULTS / "wait_estimates.svg").write_text(re.sub(r"\n\s*", "\n", lines), encoding="utf-8")


def main() -> None:
    """Replay all scenarios, print and write the table and the plot."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--real", type=int, default=0, help="also run so many jobs on the demo model")
    parser.add_argument("--only", help="print the row of one replay, and write nothing")
    args = parser.parse_args()
    panels: dict[str, tuple[Sequence[ComparedWait], float]] = {}
    lines: list[str] = []
    real: Sequence[ComparedWait] = ()
    if args.real:
        foreign = machine.ForeignCpu()
        real = measure_demo_model(args.real)
        text = f"{args.real} chats at once on the demo model; others took {foreign.share():.0%} of the CPU"
        real_row = row(text, real)
        print(real_row, flush=True)
    for scenario in SCENARIOS:
        if args.only in (None, scenario.name):
            compared = [one for seed in SEEDS for one in Replay(scenario, seed).run()]
            panels[scenario.name] = compared, scenario.changes_s
            lines.append(row(scenario.description, compared, scenario.changes_s, scenario.joins_s[0]))
            print(lines[-1], flush=True)
    if args.only is not None:
        return
    if args.real:
        panels["demo model"] = real, math.inf
        lines.append(real_row)
    facts = {
        **machine.describe(),
        "command": "PYTHONPATH=ops python -m bench.studies.wait_estimates" + f" --real {args.real}" * (args.real > 0),
        "revision": machine.revision(),
        "sample": SAMPLE_S,
        "sampled": NUM_SAMPLED,
        "min_wait": MIN_WAIT_S,
        "seeds": len(SEEDS),
    }
    text = "\n\n![estimate ÷ truth over time](wait_estimates.svg)\n\nThe lines: 1, and 1.3 either way.\n"
    (RESULTS / "wait_estimates.md").write_text(HEAD.format(**facts) + "\n".join(lines) + text, encoding="utf-8")
    plot(panels)


if __name__ == "__main__":
    main()
