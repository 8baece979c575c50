"""The rule for ties: greedy tokens may leave the reference only where its two best logits are as good as equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

MAX_TIE_GAP = 1e-3


def num_departures(
    model: Any, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], *, max_gap: float = MAX_TIE_GAP
) -> int:
    """How many (prompt, output) leave `model`'s own greedy path; asserts that each does so at a tie only.

    One pass over prompt and output says what transformers' `generate` would choose behind each prefix. Arithmetic that
    rounds more than float32 knows ties of a wider `max_gap`.
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
