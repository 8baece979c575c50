"""Prompts for an engine's batch."""

from __future__ import annotations

import random

from penstock.gpu_node.engine import Engine

TEXT = (
    "A penstock is the gated pipe that feeds a turbine. Requests stand in a reservoir, the gate opens by pressure, "
    "and the turbine never starves and never floods. Explain in a few words why that is so, and what happens when "
    "the water is low. "
)


def mixed_prompts(engine: Engine, count: int) -> list[list[int]]:
    """Return prompts of 4 to 110 tokens. A third of them share a prefix."""
    rng = random.Random(1)
    words = TEXT.split()
    texts = [" ".join(rng.choices(words, k=rng.randrange(4, 50))) for _ in range(count)]
    return [engine.tokenizer.encode((TEXT if i % 3 == 0 else "") + text) for i, text in enumerate(texts)]
