"""Microseconds of the host per step: `GpuRunner.submit` and `result` with launches stubbed.

Plans are real, graphs are replayed as nothing, and the copies to and from the GPU are copies within the host's memory.
What CUDA's driver takes to enqueue a graph, three copies and four events is not included.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench_gpu.models import Options, make_model, spec_of
from bench_gpu.plans import decode_plan, plan_of, random_tables
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.runner import GpuRunner
from penstock.gpu_node.model.protocol import StepPlan

_CONTEXT = 1024
_PREFILL_TOKENS = 1024
_VOCAB = 1024
"""The host's work does not depend on the vocabulary."""
ROWS = (64, 128, 256)
TARGET_US = 1000.0
"""For 256 rows: half of a step of 2 ms, so that the host is never what a step waits for."""


class HostOnly(Device):
    """Captures graphs whose replay does nothing."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def capture(self, work: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
        """Return a replay that does nothing; never run `work`."""
        del work
        return _replay_nothing, pool


def _replay_nothing() -> None:
    pass


def plans() -> tuple[GpuRunner, dict[str, StepPlan]]:
    """Return a runner, and steps by name: decode steps, and decode rows beside two prefill chunks."""
    spec = replace(spec_of("qwen3-0.6b"), vocab_size=_VOCAB)
    spec = replace(spec, layers=spec.layers[:1])
    most = max(ROWS) * _CONTEXT // 16 + 2 * _PREFILL_TOKENS // 16
    options = Options(max_num_seqs=max(ROWS), max_model_len=2 * _CONTEXT, num_blocks=most)
    model = make_model("host", spec, HostOnly(), options)
    tables = random_tables(model, max(ROWS) + 2, _CONTEXT - 16)
    if tables is None:
        raise RuntimeError(f"{most} blocks do not hold {max(ROWS)} contexts of {_CONTEXT} tokens")
    steps = {}
    for rows in ROWS:
        # Tokens of the step before, which is in flight.
        previous = (-1 - np.arange(rows)).astype(np.int32)
        steps[f"decode {rows}"] = decode_plan(previous, _CONTEXT - 16, tables[:rows], temperature=0.7, top_p=0.9)
    rows = 64
    ids = [*(np.array([-1 - i], np.int32) for i in range(rows)), *[np.ones(_PREFILL_TOKENS // 2, np.int32)] * 2]
    starts = np.array([_CONTEXT - 17] * rows + [0, 0], np.int32)
    sampled = np.arange(rows + 2, dtype=np.int32)
    steps[f"mixed {rows} + {_PREFILL_TOKENS}"] = plan_of(ids, starts, tables[: rows + 2], sampled)
    return model.runner, steps


def measure_us(runner: GpuRunner, plan: StepPlan, *, repeats: int) -> tuple[float, float]:
    """Return the median CPU microseconds of `submit` and of `result`, with two steps in flight."""
    submits, results = [], []
    earlier = runner.submit(plan)
    for _ in range(repeats):
        began = time.thread_time_ns()
        step = runner.submit(plan)
        submitted = time.thread_time_ns()
        earlier.result()
        results.append(time.thread_time_ns() - submitted)
        submits.append(submitted - began)
        earlier = step
    return statistics.median(submits) / 1e3, statistics.median(results) / 1e3


def main() -> None:
    """Print a table, or what takes the time of one step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--profile", help="name of a step, such as 'decode 256': print the functions that take most")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runner, steps = plans()
    if given.profile:
        profiler = cProfile.Profile()
        profiler.runcall(measure_us, runner, steps[given.profile], repeats=given.repeats)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
        return
    print("| step | submit µs | result µs |\n|---|---|---|")
    for name, plan in steps.items():
        submit, result = measure_us(runner, plan, repeats=given.repeats)
        print(f"| {name} | {submit:.0f} | {result:.0f} |", flush=True)


if __name__ == "__main__":
    main()
