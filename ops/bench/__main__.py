"""`python -m bench`: engine, queue and transformers on the same workloads in one run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from bench import machine, report
from bench.runners import RUNNERS, WORKLOADS

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Runs everything `--repeats` times, in turn, so that a slow spell of the machine meets all alike."""
    from penstock.cli.demo_model import demo_model

    parser = argparse.ArgumentParser(prog="bench", description=main.__doc__)
    parser.add_argument("--model", default=None, help="hub id, folder or .gguf file; the demo model if not given")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(RUNNERS), choices=list(RUNNERS))
    parser.add_argument("--name", default="offline", help="results/<name>.json and .md")
    options = parser.parse_args()
    model = options.model or str(demo_model())
    runs: report.Runs = {}
    for _ in range(options.repeats):
        for workload in WORKLOADS:
            for kind in options.only:
                result = _run(kind, model, options.dtype, workload)
                runs.setdefault(f"{kind} {workload}", []).append(result)
                print(f"{kind} {workload}: {result}", file=sys.stderr)
    print(report.write(RESULTS, options.name, machine.describe(), runs, "make bench"))


def _run(kind: str, model: str, dtype: str, workload: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.runners", kind, model, dtype, workload]
    # Each engine waits at its barriers as it likes best, whatever we were started with.
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    with machine.ForeignCpu() as foreign:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result | {"foreign_cpu": round(foreign.share, 3)}


if __name__ == "__main__":
    main()
