"""The rule for ties: greedy tokens may differ from the reference only if its two best logits are almost equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

MAX_TIE_GAP = 1e-3


def num_departures(
    model: Any, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], *, max_gap: float = MAX_TIE_GAP
) -> int:
    """Return how many (prompt, output) pairs leave `model`'s greedy path. Assert that each leaves it at a tie.

    One pass over prompt and output computes what transformers' `generate` would choose after each prefix. Arithmetic
    less precise than float32 needs a wider `max_gap`.
    """
    departures = 0
    for prompt, output in pairs:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        wrong = (logits.argmax(-1) != torch.tensor(list(output))).nonzero()
        if len(wrong):
            departures += 1
            best, second = logits[wrong[0, 0]].topk(2).values.tolist()
            assert best - second < max_gap
    return departures
