"""`python -m bench`: penstock and other engines on the same workloads.

Resumes where an earlier start was aborted: runs are kept in build/bench/<campaign>.jsonl.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path

from bench import campaign, machine, peers, report, verdicts
from bench.contestants import CONTESTANTS
from bench.journal import Journal, journal_path
from bench.larger import table
from bench.larger.ceilings import read_gb_per_s
from bench.larger.contestants import of_shape
from bench.larger.models import MODEL_SHAPES
from bench.workload import WORKLOADS

RESULTS = Path(__file__).parent / "results"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options; engines are chosen by how their names begin."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--model", help="folder or .gguf file; the demo model if not given")
    parser.add_argument("--model-shape", choices=list(MODEL_SHAPES), help="random weights instead of a model")
    parser.add_argument("--engines", nargs="+", metavar="NAME", default=[""], help="names or beginnings: " + names())
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tries", type=int, default=3, help="most runs of one engine, workload and repeat if dirty")
    parser.add_argument("--campaign", default="main", help="which journal to go on with")
    parser.add_argument("--redo", action="store_true", help="forget these engines' runs of these workloads first")
    parser.add_argument("--report", action="store_true", help="run nothing, write the tables of what was run")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def names() -> str:
    """All engines."""
    return ", ".join(CONTESTANTS)


def main() -> None:
    """Runs what is missing, writes the reports."""
    from penstock.cli.demo_model import demo_model

    options = parse(sys.argv[1:])
    contestants = of_shape(options.model_shape) if options.model_shape else list(CONTESTANTS.values())
    # An exception, so that the run under way is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = [one for one in contestants if one.name.startswith(tuple(options.engines))]
    journal = Journal(journal_path(options.campaign, options.model_shape))
    if options.redo:
        journal.forget({one.name for one in chosen}, set(options.workloads))
    model = options.model_shape or options.model or str(demo_model())
    read_rate = read_gb_per_s if options.model_shape else None
    runs = campaign.Campaign(journal, model, chosen, max_tries=options.tries, read_rate=read_rate)
    if not options.report:
        if options.model_shape:
            table.prepare(options.model_shape, chosen)
        runs.run(options.workloads, options.repeats)
    scene = report.Scene(
        machine=machine.describe(),
        command=shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        peers={one.peer: peers.versions(one.peer) for one in CONTESTANTS.values() if one.peer and one.is_installed},
        missing=runs.missing(),
    )
    if options.model_shape:
        print(table.write(options.results, scene, options.campaign))
        return
    print(report.write(options.results, scene, journal.runs, CONTESTANTS.values()))
    try:
        from bench import plots

        plots.write(report.raw_folder(), verdicts.medians(journal.runs))
    except ModuleNotFoundError as error:
        print(f"no plots: {error.name} is not installed (the bench extra)", file=sys.stderr)


if __name__ == "__main__":
    main()
