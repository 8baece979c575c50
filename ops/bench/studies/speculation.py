"""What drafts give and what they cost: `python -m bench.studies.speculation` writes results/speculation.md."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.machine import describe, revision
from bench.workload import offline_mix
from penstock.cli.demo_model import demo_model
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.engine.offline import spread

ROOT = Path(__file__).parents[3]
RESULTS = Path(__file__).parents[1] / "results"
COMMAND = "PYTHONPATH=ops PYTHONSAFEPATH=1 .venv/bin/python -m bench.studies.speculation"
REPEATS = 3
BATCHES = (1, 8, 32)
ROUNDS = 4
"""Requests for each place, where places are taken again."""
WEIGHTS = ("int8", "none")
OUTPUT = (30, 120)


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts, each with its parameters, and how many run at once."""

    name: str
    prompts: list[Any]
    params: list[SamplingParams]
    at_once: int


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one engine."""

    wall_s: float
    num_tokens: int
    drafted: int
    accepted: int


def main() -> None:
    """Measure on the demo model, alternately with and without drafts."""
    machine = describe()
    lines = [
        "# Speculative decoding by prompt lookup",
        "",
        f"SmolLM2-135M, native runner, {machine['cores']} cores of {machine['cpu']}, {machine['date']}, {revision()}. "
        f"`{COMMAND}`",
        "",
        f"Each load runs alternately with `--speculative ngram` and without, {REPEATS} times each; medians. *Copies*: "
        "chats that ask for a text or code of the prompt again. *Stories*: chats that ask for something new. "
        f"*8 of {8 * ROUNDS}*: a request that ends is replaced by the next one. *Mix*: the offline mix of `bench`.",
        "",
        "| weights | load | at once | tokens/s off | on | time off ÷ on | accepted ÷ drafted |",
        "|---|---|---|---|---|---|---|",
    ]
    for weights in WEIGHTS:
        lines += _rows(weights)
    (RESULTS / "speculation.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _rows(weights: str) -> Iterator[str]:
    settings = {"quantization": weights, "kv_cache_gib": 0.5, "max_model_len": 2048}
    off, on = (Engine(EngineConfig(model=str(demo_model()), speculative=name, **settings)) for name in ("off", "ngram"))
    shown = {"auto": "Q4_1", "none": "bf16"}.get(weights, weights)
    for load in _loads():
        pairs = [(_run(off, load), _run(on, load)) for _ in range(REPEATS + 1)][1:]
        speeds = [median(run.num_tokens / run.wall_s for run in runs) for runs in zip(*pairs, strict=True)]
        ratio = median(a.wall_s / b.wall_s for a, b in pairs)
        drafted, accepted = (sum(getattr(run, name) for _, run in pairs) for name in ("drafted", "accepted"))
        row = f"| {shown} | {load.name} | {load.at_once} of {len(load.prompts)} | {speeds[0]:.0f} | {speeds[1]:.0f} "
        row += f"| {ratio:.2f} | {accepted / max(1, drafted):.2f} |"
        print(row, flush=True)
        yield row


def _run(engine: Engine, load: Load) -> Run:
    asked = spread(load.prompts, load.params, None, engine.tokenizer)[::-1]
    before, start_s, num_tokens, num_open = engine.stats(), time.perf_counter(), 0, 0
    while asked or num_open:
        while asked and num_open < load.at_once:
            engine.add(asked.pop())
            num_open += 1
        for output in engine.step():
            num_tokens += len(output.token_ids)
            num_open -= output.usage is not None
    wall_s, after = time.perf_counter() - start_s, engine.stats()
    drafted, accepted = (getattr(after, name) - getattr(before, name) for name in ("drafted_tokens", "accepted_tokens"))
    return Run(wall_s, num_tokens, drafted, accepted)


def _loads() -> Iterator[Load]:
    for name, asked in (("copies", _copies()), ("stories", _stories())):
        for batch in BATCHES:
            yield from (_chats(name, asked[:num], batch) for num in (batch, batch * ROUNDS))
    mix = offline_mix()
    params = [SamplingParams(temperature=0, max_tokens=one.num_output, ignore_eos=True) for one in mix]
    yield Load("mix", [one.prompt for one in mix], params, len(mix))


def _copies() -> list[str]:
    text, code = (
        (ROOT / name).read_text() for name in ("docs/ARCHITECTURE.md", "gpu_node/engine/scheduler/scheduler.py")
    )
    return [
        prompt
        for i in range(max(BATCHES) * ROUNDS // 2)
        for prompt in (
            f"Repeat the following text exactly:\n\n{text[280 * i : 280 * i + 600]}",
            f"Add type hints to this code and print all of it:\n```python\n{code[180 * i : 180 * i + 500]}\n```",
        )
    ]


def _stories() -> list[str]:
    things = ("a dam", "the rain", "an old mill", "two cats", "the sea", "a lost key", "a violin", "a long winter")
    places = ("", " in a small town", " far away", " at night")
    ways = ("Write a short story about", "Explain to a child", "Write a letter about", "List ten facts about")
    return [f"{way} {thing}{place}." for place in places for way in ways for thing in things]


def _chats(name: str, asked: list[str], at_once: int) -> Load:
    rng = random.Random(0)
    limits = [OUTPUT[1] if len(asked) == at_once else rng.randint(*OUTPUT) for _ in asked]
    params = [SamplingParams(temperature=0, max_tokens=limit) for limit in limits]
    return Load(name, [[{"role": "user", "content": one}] for one in asked], params, at_once)


if __name__ == "__main__":
    main()
