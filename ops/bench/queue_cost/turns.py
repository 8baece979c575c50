"""Run one load after the other, alternately bare and through Redis, so that each pair of runs is close in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import psutil
from redis import Redis

from bench.engines.penstock_queue import QueuedSession
from bench.machine import ForeignCpu
from bench.queue_cost.loads import load_of
from bench.queue_cost.plain import PlainSession
from bench.queue_cost.processes import CpuMeter
from bench.stopwatch import Stopwatch

MOST_FOREIGN = 0.05
_BYTES = {"in": "total_net_input_bytes", "out": "total_net_output_bytes"}
Measurements = dict[str, float]
Run = Callable[[str, int], Measurements]
"""Answers a load with a seed."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One load, bare and through Redis."""

    bare: Measurements
    queued: Measurements


def take_turns(bare: Run, queued: Run, load: str, count: int) -> list[Turn]:
    """So many turns in which other processes had little of the CPU, behind one that warms up."""
    _turn(bare, queued, load, -1)
    turns: list[Turn] = []
    for seed in range(3 * count):
        foreign = ForeignCpu()
        turn = _turn(bare, queued, load, seed)
        share = foreign.share()
        verdict = "again" if share >= MOST_FOREIGN else "counts"
        rates = [
            f"{run['tokens_per_s']:.0f} tokens/s, TTFT {run['ttft_p50_ms']:.2f} ms" for run in (turn.bare, turn.queued)
        ]
        print(f"{load}: bare {rates[0]}; queued {rates[1]}; others had {share:.1%}: {verdict}", flush=True)
        if share < MOST_FOREIGN:
            turns.append(turn)
        if len(turns) == count:
            return turns
    raise RuntimeError("the machine is too busy to measure on")


def _turn(bare: Run, queued: Run, load: str, seed: int) -> Turn:
    if seed % 2:
        measured = bare(load, seed)
        return Turn(measured, queued(load, seed))
    measured = queued(load, seed)
    return Turn(bare(load, seed), measured)


def run_queued(session: QueuedSession, load: str, seed: int, per_s: float) -> Measurements:
    """Return the load's measurements, with the CPU time and the bytes of Redis, client and node's loop."""
    workload = load_of(load, seed, per_s)
    with Redis.from_url(session.redis_url) as redis:
        watch = Stopwatch(workload)
        before = redis.info("stats")
        with CpuMeter(_pids(session)) as meter:
            session.run(workload, watch)
        after = redis.info("stats")
    return watch.measured() | {name: after[key] - before[key] for name, key in _BYTES.items()} | meter.spent_us


def run_plain(session: PlainSession, load: str, seed: int) -> Measurements:
    """Return the load's measurements."""
    watch = Stopwatch(workload := load_of(load, seed, 0.0))
    session.run(workload, watch)
    return watch.measured()


def _pids(session: QueuedSession) -> dict[str, int]:
    me = psutil.Process()
    [redis] = [child.pid for child in me.children(recursive=True) if child.name() == "redis-server"]
    return {"client": me.pid, "node": session.node_pid, "redis": redis}


def medians(turns: list[Turn], name: str) -> tuple[float, float]:
    """Return the medians of one measurement, bare and through Redis."""
    return median(turn.bare[name] for turn in turns), median(turn.queued[name] for turn in turns)


def compared(turns: list[Turn], name: str, compare: Callable[[float, float], float], number_format: str) -> str:
    """Compare a measurement through Redis with the bare one: the median over the turns, with its quartiles."""
    values = sorted(compare(turn.queued[name], turn.bare[name]) for turn in turns)
    low, high = values[len(values) // 4], values[-1 - len(values) // 4]
    return f"{median(values):{number_format}} ({low:{number_format}}…{high:{number_format}})"
