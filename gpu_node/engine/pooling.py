"""Ask for the hidden states of a step's prompt tokens that are embedded, and pool them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.model.protocol import PooledTokens, StepPlan


def pooled_tokens(step: Step, plan: StepPlan) -> PooledTokens | None:
    """Return the tokens of a step whose hidden states are wanted, or None."""
    parts: list[tuple[NDArray[np.int32], int]] = []
    for i, seq in enumerate(step.seqs):
        if (pooled := seq.pooled) is None:
            continue
        start = int(step.starts[i])
        first, end = max(start, pooled.next_token), min(int(step.ends[i]), pooled.end)
        if first < end:
            parts.append((np.arange(first - start, end - start, dtype=np.int32) + plan.query_starts[i], i))
    if not parts:
        return None
    tokens, seqs = zip(*parts, strict=True)
    return PooledTokens(np.concatenate(tokens), np.repeat(np.array(seqs, np.int32), [len(part) for part in tokens]))


def note_hidden(step: Step, plan: StepPlan, hidden: NDArray[np.float32] | None) -> None:
    """Pool the hidden states of a step."""
    if plan.pooled is None or hidden is None:
        return
    for i in np.unique(plan.pooled.seqs).tolist():
        pooled = step.seqs[i].pooled
        rows = np.flatnonzero(plan.pooled.seqs == i)
        if pooled is not None:
            pooled.add(int(plan.positions[plan.pooled.tokens[rows[0]]]), hidden[rows])
