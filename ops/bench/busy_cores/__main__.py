"""`… -m bench.busy_cores` alternates between the conditions and writes results/busy_cores.md; needs two cores or more.

A condition with a CPU quota needs a writable control group (root) and is skipped without one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.busy_cores.quota import one_cpu_group
from bench.machine import describe, revision
from penstock.cli.demo_model import demo_model

RESULTS = Path(__file__).parents[1] / "results" / "busy_cores.md"
COMMAND = "PYTHONPATH=ops PYTHONSAFEPATH=1 .venv/bin/python -m bench.busy_cores"
CONDITIONS = ("alone", "busy loops", "two engines", "one core", "quota of one CPU", "one core lost")
BUSY_LOOP = "while True: pass"
Measurements = dict[str, float]


@contextmanager
def engine(
    seconds: float, settings: dict[str, object], before: Callable[[], object] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A loaded engine that waits for its turn. `before` runs in the new process first."""
    command = [sys.executable, "-m", "bench.busy_cores.engine", str(seconds), json.dumps(settings)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=before,  # noqa: PLW1509
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the engine did not start")
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def busy_loops(count: int, before: Callable[[], object] | None = None) -> Iterator[None]:
    """Processes that compute all the time, at the engine's own priority unless `before` changes it."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP], preexec_fn=before) for _ in range(count)]  # noqa: PLW1509
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def start(process: subprocess.Popen[str]) -> None:
    """Tell a waiting engine to measure."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def measured(process: subprocess.Popen[str]) -> Measurements:
    """Return what an engine measured."""
    assert process.stdout is not None
    found: Measurements = json.loads(process.stdout.readline())
    return found


def measure(condition: str, seconds: float, settings: dict[str, object]) -> list[Measurements]:
    """Run one condition once; return each engine's measurements, or none if the machine does not allow it."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        before: Callable[[], object] | None = None
        if condition == "one core":
            before = lambda: os.sched_setaffinity(0, cores[:1])  # noqa: E731
        if condition == "quota of one CPU":
            join = stack.enter_context(one_cpu_group())
            if join is None:
                return []
            before = join
        count = 2 if condition == "two engines" else 1
        processes = [stack.enter_context(engine(seconds, settings, before)) for _ in range(count)]
        if condition == "busy loops":
            stack.enter_context(busy_loops(len(cores)))
        if condition == "one core lost":
            stack.enter_context(busy_loops(1, lambda: _take_core(cores[-1])))
        for process in processes:
            start(process)
        return [measured(process) for process in processes]


def _take_core(core: int) -> None:
    """Keep the calling process on a core, where it has a hundred times the weight of an ordinary one; needs root."""
    os.sched_setaffinity(0, {core})
    os.nice(-20)


def report(found: dict[str, list[list[Measurements]]], settings: dict[str, object], turns: int) -> list[str]:
    """The table, a row a condition: medians over the turns."""
    machine = describe()
    base = _median([sum(f["tokens_per_s"] for f in turn) for turn in found["alone"]])
    lines = [
        "# Speed beside other load",
        "",
        f"SmolLM2-135M, native runner, 16 sequences that decode, `{json.dumps(settings)}`, {machine['cores']} cores of "
        f"{machine['cpu']}, {machine['date']}, {revision()}. Medians of {turns} turns. `{COMMAND}`",
        "",
        "| condition | tokens/s | ÷ alone | step: median, p99, longest (ms) | longest ÷ median |",
        "|---|---|---|---|---|",
    ]
    for condition, runs in found.items():
        if not any(runs):
            continue
        speed = _median([sum(f["tokens_per_s"] for f in turn) for turn in runs])
        median, p99, longest = (
            _median([max(f[name] for f in turn) for turn in runs]) for name in ("median_ms", "p99_ms", "longest_ms")
        )
        steps = f"{median:.1f}, {p99:.1f}, {longest:.1f}"
        lines.append(f"| {condition} | {speed:.0f} | {speed / base:.2f} | {steps} | {longest / median:.1f} |")
    return lines


def _median(values: list[float]) -> float:
    return statistics.median(values)


def main() -> None:
    """Run the conditions alternately, print each measurement as it comes, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=CONDITIONS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument(
        "--settings", type=json.loads, default={"quantization": "int8"}, help="of EngineConfig, as JSON"
    )
    parser.add_argument("--write", action="store_true", help="write the table to results/")
    options = parser.parse_args()
    settings = {"model": str(demo_model()), **options.settings}
    conditions = ["alone", *(name for name in options.conditions if name != "alone")]
    found: dict[str, list[list[Measurements]]] = {name: [] for name in conditions}
    for _ in range(options.turns):
        for condition in conditions:
            found[condition].append(measure(condition, options.seconds, settings))
            print(condition, json.dumps(found[condition][-1]), flush=True)
    lines = report(found, options.settings, options.turns)
    print("\n".join(lines))
    if options.write:
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
