"""The engine alone in a process of its own, which answers one load after the other: `… bench.queue_cost bare SPEC`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from bench.child import Spec
from bench.queue_cost.loads import load_of
from bench.stopwatch import Stopwatch

Ask = Callable[[str, int, float], dict[str, float]]


def serve_bare(spec: Spec) -> None:
    """Answer each line of arguments for `load_of` with the load's measurements, until there are no more lines."""
    from bench.queue_cost.settings import open_bare
    from penstock.runtime.process_memory import freeze_gc

    with open_bare(spec) as session:
        freeze_gc()
        session.bind_thread()
        for line in sys.stdin:
            workload = load_of(*json.loads(line))
            watch = Stopwatch(workload)
            session.run(workload, watch)
            print(json.dumps(watch.measured()), flush=True)


@contextmanager
def bare_engine(spec: Spec) -> Iterator[Ask]:
    """Such a process, and what puts a load to it."""
    argv = [sys.executable, "-m", "bench.queue_cost", "bare", json.dumps(asdict(spec))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(load: str, seed: int, per_s: float) -> dict[str, float]:
            print(json.dumps([load, seed, per_s]), file=process.stdin, flush=True)
            answer: dict[str, float] = json.loads(process.stdout.readline())
            return answer

        yield ask
        process.stdin.close()
