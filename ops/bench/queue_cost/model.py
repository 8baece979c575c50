"""Engines bare and behind the queue, in turns of one run: `… bench.queue_cost model` writes results/queue.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
from redis import Redis

from bench.child import Spec
from bench.engines.penstock_queue import QueuedSession
from bench.machine import ForeignCpu, describe, revision
from bench.queue_cost.bare import Ask, bare_engine
from bench.queue_cost.loads import load_of
from bench.queue_cost.processes import CpuMeter
from bench.queue_cost.settings import all_settings, open_queued
from bench.stopwatch import Stopwatch

RESULTS = Path(__file__).parents[1] / "results"
COMMAND = "PYTHONPATH=ops PYTHONSAFEPATH=1 .venv/bin/python -m bench.queue_cost model"
MOST_FOREIGN = 0.05
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Turn:
    """One load, bare and through Redis, and what passing it on took."""

    bare: Figures
    queued: Figures
    spent: Figures


def measure_model(num_turns: int) -> None:
    """Runs all settings and writes the table."""
    machine = describe()
    lines = [
        "# What the queue costs",
        "",
        f"SmolLM2-135M, native runner, {machine['cores']} cores of {machine['cpu']}, {machine['date']}, {revision()}. "
        f"`{COMMAND}`",
        "",
        "The engine alone in a process, and client → Redis → node → client, answer the same loads by turns: medians of "
        f"{num_turns} turns, ratios and differences of each turn's two runs with their quartiles; a turn in which "
        "other processes had 5 % of the CPU is done again. *Mix*: 64 requests at once. *Single*: streams of 32 + 32 "
        "tokens, one behind the other.",
        "",
        "*On both cores*: Redis, client and the node's loop take their time from the model's threads. *On one core*: "
        "they have the other. *Elsewhere*: an engine whose steps take their time without computing here, as those of a "
        "card do.",
        "",
        "| engine | mix: tokens/s bare | through Redis | ratio | single: TTFT ms bare | through Redis | added ms "
        "| ITL ms bare | through Redis |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    costs = [
        "",
        "Per token of the mix: CPU of the whole process (of the node: its event loop), and bytes on Redis's sockets.",
        "",
        "| engine | CPU µs/token: Redis | client | node's loop | bytes/token to Redis | from Redis |",
        "|---|---|---|---|---|---|",
    ]
    for setting in all_settings():
        print(setting.name, flush=True)
        mix, single = _measure(setting.spec, num_turns)
        lines.append(f"| {setting.name} | {_speed(mix)} | {_latency(single)} |")
        costs.append(f"| {setting.name} | {_costs(mix)} |")
    (RESULTS / "queue.md").write_text("\n".join(lines + costs) + "\n", encoding="utf-8")


def _measure(spec: Spec, num_turns: int) -> tuple[list[Turn], list[Turn]]:
    with open_queued(spec) as queued, bare_engine(spec) as bare:
        for load in ("mix", "single"):
            _turn(bare, queued, load, -1)
        return _turns(bare, queued, "mix", num_turns), _turns(bare, queued, "single", num_turns)


def _turns(bare: Ask, queued: QueuedSession, load: str, count: int) -> list[Turn]:
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


def _turn(bare: Ask, queued: QueuedSession, load: str, seed: int) -> Turn:
    if seed % 2:
        figures = bare(load, seed)
        return Turn(figures, *_queued_run(queued, load, seed))
    queued_figures, spent = _queued_run(queued, load, seed)
    return Turn(bare(load, seed), queued_figures, spent)


def _queued_run(queued: QueuedSession, load: str, seed: int) -> tuple[Figures, Figures]:
    """The load's figures, and what passing it on took."""
    workload = load_of(load, seed)
    with Redis.from_url(queued.redis_url) as redis:
        watch = Stopwatch(workload)
        before = redis.info("stats")
        with CpuMeter(_pids(queued)) as meter:
            queued.run(workload, watch)
        after = redis.info("stats")
    return watch.measured(), {name: after[key] - before[key] for name, key in _BYTES.items()} | meter.spent_us


_BYTES = {"in": "total_net_input_bytes", "out": "total_net_output_bytes"}


def _pids(queued: QueuedSession) -> dict[str, int]:
    me = psutil.Process()
    [redis] = [child.pid for child in me.children(recursive=True) if child.name() == "redis-server"]
    return {"client": me.pid, "node": queued.node_pid, "redis": redis}


def _speed(turns: list[Turn]) -> str:
    return _pair(
        turns, "tokens_per_s", ".0f", lambda turn: turn.queued["tokens_per_s"] / turn.bare["tokens_per_s"], ".3f"
    )


def _latency(turns: list[Turn]) -> str:
    added = _pair(
        turns, "ttft_p50_ms", ".1f", lambda turn: turn.queued["ttft_p50_ms"] - turn.bare["ttft_p50_ms"], ".2f"
    )
    itl = (median(run["itl_mean_ms"] for run in runs) for runs in ([t.bare for t in turns], [t.queued for t in turns]))
    return " | ".join([added, *(f"{value:.2f}" for value in itl)])


def _pair(turns: list[Turn], name: str, form: str, compare: Callable[[Turn], float], compared_form: str) -> str:
    """Both medians, and the median of what compares them with its quartiles."""
    compared = sorted(map(compare, turns))
    low, high = compared[len(compared) // 4], compared[-1 - len(compared) // 4]
    cells = [
        format(median(run[name] for run in runs), form) for runs in ([t.bare for t in turns], [t.queued for t in turns])
    ]
    spread = f"{low:{compared_form}}…{high:{compared_form}}"
    return " | ".join([*cells, f"{median(compared):{compared_form}} ({spread})"])


def _costs(turns: list[Turn]) -> str:
    def per_token(name: str) -> float:
        return median(turn.spent[name] / turn.queued["output_tokens"] for turn in turns)

    cpu = (f"{per_token(name):.1f}" for name in ("redis", "client", "node loop"))
    return " | ".join([*cpu, *(f"{per_token(name):.0f}" for name in ("in", "out"))])
