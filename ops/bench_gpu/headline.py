"""The rows of the README's table: each shape's floor, its goal, and what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Goal:
    """A shape and the fraction of its ceiling that is wanted."""

    model: str
    quantization: str
    batch: int
    """Sequences that decode; 0: a prompt."""
    tokens: int
    """Context of each sequence, or tokens of the prompt."""
    fraction: float
    rules: dict[str, float] = field(default_factory=dict)
    """How rows sample."""


GOALS = (
    Goal("llama-8b", "none", 1, 128, 0.88),
    Goal("llama-8b", "none", 64, 1024, 0.85, {"top_p": 0.9}),
    Goal("llama-8b", "none", 0, 2048, 0.62),
    Goal("llama-8b", "none", 0, 8192, 0.62),
    Goal("llama-8b", "fp8", 1, 128, 0.85),
    Goal("llama-8b", "int4", 1, 128, 0.75),
    Goal("llama-1b", "none", 1, 128, 0.78),
    Goal("qwen3-0.6b", "none", 256, 1024, 0.80),
)
DRY_GOALS = (Goal("tiny", "none", 2, 20, 0.0, {"top_p": 0.9}), Goal("tiny", "int4", 0, 18, 0.0))


@dataclass(frozen=True)
class LoadGoal:
    """Requests of ShareGPT's lengths that are all there at once, and the output tokens per second that are wanted."""

    model: str
    count: int
    max_num_seqs: int
    budget: int
    """Tokens of a step."""
    tokens_s: float
    divisor: int = 1
    """Shortens all lengths."""

    @property
    def name(self) -> str:
        """The row's name; its fraction is of the wanted tokens per second."""
        return f"{self.model}, {self.count} requests of ShareGPT's lengths, of {self.tokens_s:,.0f} tokens/s"


LOAD = LoadGoal("llama-8b", 1000, 512, 8192, 16_000)
DRY_LOAD = LoadGoal("tiny", 2, 2, 16, 1.0, divisor=60)


def table_of(rows: list[dict[str, Any]]) -> str:
    """Return the measured rows as a table in Markdown."""
    lines = ["| shape | ms | tokens/s | of the ceiling | goal |", "|---|---|---|---|---|"]
    for row in rows:
        if "fraction" in row:
            numbers = f"{row['ms']:.3f} | {row['tokens_s']:,.0f} | {row['fraction']:.1%} | {row['goal']:.0%}"
            lines.append(f"| {row['shape']} | {numbers} |")
        else:
            lines.append(f"| {row['shape']} | {row.get('skipped', row.get('error', ''))} | | | |")
    return "\n".join(lines)


def named(goal: Goal) -> str:
    """Return the row's name."""
    weights = "" if goal.quantization == "none" else f" {goal.quantization}"
    what = f"batch {goal.batch}, context {goal.tokens}" if goal.batch else f"prompt of {goal.tokens}"
    return f"{goal.model}{weights}, {what}{''.join(f', {name} {value}' for name, value in goal.rules.items())}"


def by_model(goals: tuple[Goal, ...]) -> Iterator[tuple[tuple[str, str], list[Goal]]]:
    """Yield the goals of each model in one format: its weights are made once."""
    keys = dict.fromkeys((goal.model, goal.quantization) for goal in goals)
    for key in keys:
        yield key, [goal for goal in goals if (goal.model, goal.quantization) == key]
