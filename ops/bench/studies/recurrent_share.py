"""`PYTHONPATH=ops python -m bench.studies.recurrent_share`: the share of a prompt's time that recurrent mixers take.

The files are those of `bench.studies.recurrent`. While prompts run, Linux's `perf` samples the process; samples in the
kernels' recurrent stage count, its convolutions, gates and waits for other threads included. On a busy machine the
share is too small, because threads that wait for one that has lost its core count as the rest of the step.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.contestants import NUM_CORES
from bench.studies.beside_llamacpp import SHORT, file_of, packed_engine, random_ids, times_of
from bench.studies.recurrent import KINDS, PROMPTS, SHAPES

STAGE = "RecurrentStage"
"""The class whose functions and loops are the recurrence."""
MOST = 0.15
NUM_PROMPTS = 3
STARTS_S = 0.5
"""What `perf` has to begin. Its first samples may be of an engine that waits, in functions that are not counted."""


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--kinds", nargs="*", default=[*KINDS])
    parser.add_argument("--isas", nargs="*", default=["avx512", "avx2"])
    parser.add_argument("--prompts", type=int, nargs="*", default=[*PROMPTS])
    parser.add_argument("--model", type=Path, help="print the share of one file, for one of --isas and --prompts")
    args = parser.parse_args()
    if args.model is not None:
        print(_share(args.model, args.isas[0], args.prompts[0]))
        return
    print(f"{NUM_CORES} threads\n\n| model | instructions | prompt | share of the recurrence | goal |")
    print("|---|---|---|---|---|")
    for name in args.only:
        for kind in args.kinds:
            path = file_of(name, kind, SHAPES[name])
            for isa in args.isas:
                for length in args.prompts:
                    share = _share_apart(path, isa, length)
                    met = "met" if share <= MOST else "missed"
                    print(f"| {name} {kind} | {isa} | {length} | {share:.1%} | ≤ {MOST:.0%} {met} |", flush=True)


def _share_apart(path: Path, isa: str, length: int) -> float:
    """Measure a file in a process of its own."""
    command = [sys.executable, "-m", "bench.studies.recurrent_share", "--model", path]
    command += ["--isas", isa, "--prompts", str(length)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def _share(path: Path, isa: str, length: int) -> float:
    """Return the share of the samples that are in the recurrent stage, among those in the kernels."""
    engine, rng = packed_engine(path, isa), random.Random(0)
    times_of(engine, [random_ids(rng, SHORT)], 8)
    with tempfile.NamedTemporaryFile(suffix=".perf") as data:
        record = ["perf", "record", "--quiet", "-e", "cpu-clock", "-F", "999", "-p", str(os.getpid()), "-o", data.name]
        with subprocess.Popen(record, stdin=subprocess.DEVNULL) as perf:
            time.sleep(STARTS_S)
            for _ in range(NUM_PROMPTS):
                times_of(engine, [random_ids(rng, length)], 1)
            perf.send_signal(signal.SIGINT)
        script = ["perf", "script", "-i", data.name, "-F", "ip,sym"]
        done = subprocess.run(script, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    samples = [line for line in done.stdout.splitlines() if "penstock" in line]
    return sum(STAGE in line for line in samples) / len(samples)


if __name__ == "__main__":
    main()
