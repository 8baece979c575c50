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
LOADS = ("mix", "single", "chance")
PERCENTS = (50, 90, 99)


def measure_model(num_turns: int) -> None:
    """Runs all settings and writes the tables."""
    settings = all_settings()
    measured = {setting.name: _measure(setting, num_turns) for setting in settings}
    plain = _measure_plain(settings[-1], num_turns)
    lines = [
        *_head(num_turns),
        *_speeds({name: turns["mix"] for name, turns in measured.items()}),
        *_alone({name: turns["single"] for name, turns in measured.items()}, plain),
        *_by_chance([(setting, measured[setting.name]["chance"]) for setting in settings]),
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
        "The engine alone in a process, and client → Redis → node → client, answer the same loads alternately. Cells "
        f"are medians of {num_turns} turns; ratios and differences are of each turn's two runs, with their quartiles. "
        "A turn in which other processes had 5 % of the CPU is done again.",
        "",
        "*On both cores*: Redis, client and the node's loop take their time from the model's threads. *On one core*: "
        "they have the other. *Elsewhere*: an engine whose steps take their time without computing here, as those of a "
        "GPU do.",
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
        "32 tokens in, 32 out; the median of 12 in each turn. *A list and a channel* is the same way through Redis "
        "without penstock: LPUSH, BRPOP and a PUBLISH for each token by redis-py. Nothing is admitted, leased, kept "
        "or acknowledged; the engine is the one that computes elsewhere.",
        "",
        "| engine | TTFT ms bare | through Redis | added ms | ITL ms bare | through Redis |",
        "|---|---|---|---|---|---|",
    ]
    for name, turns in (measured | {"*a list and a channel*": plain}).items():
        lines.append(f"| {name} | {_added(turns, 'ttft_p50_ms')} | {_both(turns, 'itl_mean_ms', '.2f')} |")
    return lines


def _by_chance(measured: list[tuple[Setting, list[Turn]]]) -> list[str]:
    lines = [
        "",
        "## Streams that come by chance",
        "",
        "64 such streams in each turn; milliseconds from when a request was due. Those that come while others run wait "
        "for the end of a step, bare too.",
        "",
        "| engine | requests/s | " + " | ".join(f"TTFT p{p} bare | through Redis | added" for p in PERCENTS) + " |",
        "|---|---" + "|---" * 3 * len(PERCENTS) + "|",
    ]
    for setting, turns in measured:
        cells = " | ".join(_added(turns, f"ttft_p{percent}_ms") for percent in PERCENTS)
        lines.append(f"| {setting.name} | {setting.per_s:g} | {cells} |")
    return lines


def _costs(measured: dict[str, list[Turn]]) -> list[str]:
    lines = [
        "",
        "## What it takes",
        "",
        "Per token of the 64 requests at once: CPU of the whole process (of the node: its event loop), and bytes on "
        "Redis's sockets.",
        "",
        "| engine | CPU µs/token: Redis | client | node's loop | bytes/token to Redis | from Redis |",
        "|---|---|---|---|---|---|",
    ]
    names = {"redis": ".1f", "client": ".1f", "node loop": ".1f", "in": ".0f", "out": ".0f"}
    for name, turns in measured.items():
        cells = [
            format(median(turn.queued[key] / turn.queued["output_tokens"] for turn in turns), number_format)
            for key, number_format in names.items()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _added(turns: list[Turn], name: str) -> str:
    return f"{_both(turns, name, '.1f')} | {compared(turns, name, sub, '.2f')}"


def _both(turns: list[Turn], name: str, number_format: str) -> str:
    return " | ".join(format(value, number_format) for value in medians(turns, name))
