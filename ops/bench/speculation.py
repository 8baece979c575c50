"""What drafts give and what they cost: `python -m bench.speculation` writes results/speculation.md."""

from __future__ import annotations

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

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
COMMAND = "PYTHONPATH=ops PYTHONSAFEPATH=1 .venv/bin/python -m bench.speculation"
REPEATS = 3
BATCHES = (1, 8, 32)
WEIGHTS = ("int8", "none")
OUTPUT = 120


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts, each with its parameters."""

    name: str
    prompts: list[Any]
    params: list[SamplingParams]

    def first(self, batch: int) -> Load:
        """As many of its requests as run at once."""
        return Load(self.name, self.prompts[:batch], self.params[:batch])


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one engine."""

    wall_s: float
    num_tokens: int
    drafted: int
    accepted: int


def main() -> None:
    """Measures on the demo model, with and without drafts by turns."""
    machine = describe()
    lines = [
        "# Speculative decoding by prompt lookup",
        "",
        f"SmolLM2-135M, native runner, {machine['cores']} cores of {machine['cpu']}, {machine['date']}, {revision()}. "
        f"`{COMMAND}`",
        "",
        f"Each load runs on an engine with `--speculative ngram` and on one without by turns, {REPEATS} times each, "
        "and gives the same tokens; medians of tokens a second, and the median of the turns' ratios. *Copies*: chats "
        "that ask for a text or code of the prompt again. *Stories*: chats that ask for something new. Both greedy; "
        f"at most {OUTPUT} tokens. *Mix*: the offline mix of `bench.workload`, random tokens, 64 requests, greedy, "
        "which soon repeats itself.",
        "",
        "| weights | load | at once | tokens/s off | tokens/s on | on ÷ off | drafted ÷ tokens | accepted ÷ drafted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for weights in WEIGHTS:
        lines += _rows(weights)
    (RESULTS / "speculation.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _rows(weights: str) -> Iterator[str]:
    settings = {"quantization": weights, "kv_cache_gib": 0.5, "max_model_len": 2048}
    off, on = (Engine(EngineConfig(model=str(demo_model()), speculative=name, **settings)) for name in ("off", "ngram"))
    shown = {"auto": "Q4_1", "none": "bf16"}.get(weights, weights)
    for load, batch in _loads():
        pairs = [(_run(off, load), _run(on, load)) for _ in range(REPEATS + 1)][1:]
        speeds = [median(run.num_tokens / run.wall_s for run in runs) for runs in zip(*pairs, strict=True)]
        ratio = median(a.wall_s / b.wall_s for a, b in pairs)
        tokens, drafted, accepted = (
            sum(getattr(run, name) for _, run in pairs) for name in ("num_tokens", "drafted", "accepted")
        )
        row = f"| {shown} | {load.name} | {batch} | {speeds[0]:.0f} | {speeds[1]:.0f} | {ratio:.2f} "
        row += f"| {drafted / tokens:.2f} | {accepted / max(1, drafted):.2f} |"
        print(row, flush=True)
        yield row


def _run(engine: Engine, load: Load) -> Run:
    before, start_s = engine.stats(), time.perf_counter()
    said = engine.generate(load.prompts, load.params)
    wall_s, after = time.perf_counter() - start_s, engine.stats()
    num_tokens = sum(len(choice.token_ids) for one in said for choice in one.choices)
    drafted, accepted = (getattr(after, name) - getattr(before, name) for name in ("drafted_tokens", "accepted_tokens"))
    return Run(wall_s, num_tokens, drafted, accepted)


def _loads() -> Iterator[tuple[Load, int]]:
    for load in (_copies(), _stories()):
        for batch in BATCHES:
            yield load.first(batch), batch
    mix = offline_mix()
    params = [SamplingParams(temperature=0, max_tokens=one.num_output, ignore_eos=True) for one in mix]
    yield Load("mix", [one.prompt for one in mix], params), len(mix)


def _copies() -> Load:
    text, code = ((ROOT / name).read_text() for name in ("ARCHITECTURE.md", "gpu_node/engine/scheduler.py"))
    asked = [
        prompt
        for i in range(max(BATCHES) // 2)
        for prompt in (
            f"Repeat the following text exactly:\n\n{text[600 * i : 600 * i + 600]}",
            f"Add type hints to this code and print all of it:\n```python\n{code[500 * i : 500 * i + 500]}\n```",
        )
    ]
    return _chats("copies", asked)


def _stories() -> Load:
    things = ("a dam", "the rain", "an old mill", "two cats", "the sea", "a lost key", "a violin", "a long winter")
    ways = ("Write a short story about", "Explain to a child", "Write a letter about", "List ten facts about")
    return _chats("stories", [f"{way} {thing}." for way in ways for thing in things])


def _chats(name: str, asked: list[str]) -> Load:
    params = SamplingParams(temperature=0, max_tokens=OUTPUT)
    return Load(name, [[{"role": "user", "content": one}] for one in asked], [params] * len(asked))


if __name__ == "__main__":
    main()
