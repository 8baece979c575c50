"""Engines bare and behind the queue, in turns of one run: `… bench.queue_cost model` writes results/queue.md."""

from __future__ import annotations

from functools import partial
from operator import sub, truediv
from pathlib import Path
from statistics import median

from bench.machine import describe, revision
from bench.queue_cost.bare import bare_engine
from bench.queue_cost.plain import open_plain
from bench.queue_cost.settings import STEP_MS, Setting, all_settings, open_queued
from bench.queue_cost.turns import Turn, compared, medians, run_plain, run_queued, take_turns

RESULTS = Path(__file__).parents[1] / "results"
COMMAND = "PYTHONPATH=ops PYTHONSAFEPATH=1 .venv/bin/python -m bench.queue_cost model"
LOADS = ("mix", "single")


def measure_model(num_turns: int) -> None:
    """Runs all settings and writes the tables."""
    settings = all_settings()
    measured = {setting.name: _measure(setting, num_turns) for setting in settings}
    plain = _measure_plain(settings[-1], num_turns)
    lines = [
        *_head(num_turns),
        *_speeds({name: turns["mix"] for name, turns in measured.items()}),
        *_alone({name: turns["single"] for name, turns in measured.items()}, plain),
        *_costs({name: turns["mix"] for name, turns in measured.items()}),
    ]
    (RESULTS / "queue.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _measure(setting: Setting, num_turns: int) -> dict[str, list[Turn]]:
    print(setting.name, flush=True)
    with open_queued(setting.spec) as session, bare_engine(setting.spec) as ask:
        bare = partial(ask, per_s=setting.per_s)
        queued = partial(run_queued, session, per_s=setting.per_s)
        return {load: take_turns(bare, queued, load, num_turns) for load in LOADS}


def _measure_plain(setting: Setting, num_turns: int) -> list[Turn]:
    print("a list and a channel", flush=True)
    with open_plain(STEP_MS) as session, bare_engine(setting.spec) as ask:
        return take_turns(partial(ask, per_s=setting.per_s), partial(run_plain, session), "single", num_turns)


def _head(num_turns: int) -> list[str]:
    machine = describe()
    return [
        "# What the queue costs",
        "",
        f"SmolLM2-135M, native runner, {machine['cores']} cores of {machine['cpu']}, {machine['date']}, {revision()}. "
        f"`{COMMAND}`",
        "",
        "The engine alone in a process, and client → Redis → node → client, answer the same loads alternately. Medians "
        f"of {num_turns} turns, with quartiles of ratios and differences. *Elsewhere*: an engine whose steps take time "
        "without computing here, as a GPU's do.",
    ]


def _speeds(measured: dict[str, list[Turn]]) -> list[str]:
    lines = [
        "",
        "## Throughput",
        "",
        "64 requests at once, prompts of 16 to 512 and outputs of 16 to 256 tokens.",
        "",
        "| engine | tokens/s bare | through Redis | ratio |",
        "|---|---|---|---|",
    ]
    for name, turns in measured.items():
        bare, queued = medians(turns, "tokens_per_s")
        lines.append(f"| {name} | {bare:.0f} | {queued:.0f} | {compared(turns, 'tokens_per_s', truediv, '.3f')} |")
    return lines


def _alone(measured: dict[str, list[Turn]], plain: list[Turn]) -> list[str]:
    lines = [
        "",
        "## One stream behind the other",
        "",
        "32 tokens in, 32 out. *A list and a channel* is the same way through Redis without penstock: LPUSH, BRPOP and "
        "a PUBLISH for each token by redis-py.",
        "",
        "| engine | TTFT ms bare | through Redis | added ms | ITL ms bare | through Redis |",
        "|---|---|---|---|---|---|",
    ]
    for name, turns in (measured | {"*a list and a channel*": plain}).items():
        lines.append(f"| {name} | {_added(turns, 'ttft_p50_ms')} | {_both(turns, 'itl_mean_ms', '.2f')} |")
    return lines


def _costs(measured: dict[str, list[Turn]]) -> list[str]:
    lines = [
        "",
        "## What it takes",
        "",
        "CPU time per token of the 64 requests at once.",
        "",
        "| engine | µs/token: Redis | client | node's loop |",
        "|---|---|---|---|",
    ]
    for name, turns in measured.items():
        cells = [
            f"{median(turn.queued[key] / turn.queued['output_tokens'] for turn in turns):.1f}"
            for key in ("redis", "client", "node loop")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _added(turns: list[Turn], name: str) -> str:
    return f"{_both(turns, name, '.1f')} | {compared(turns, name, sub, '.2f')}"


def _both(turns: list[Turn], name: str, number_format: str) -> str:
    return " | ".join(format(value, number_format) for value in medians(turns, name))
