"""Pooling: the hidden states of a prompt's tokens become one vector."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import InvariantError
from penstock.contract.tasks import Embed, Pooling
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.model.protocol import PooledTokens, StepPlan

_ROWS_AT_ONCE = 256
"""Hidden states that are converted to float64 at once."""


class PooledPrompt:
    """The embedding of one request's prompt while its hidden states arrive. A pooled token stays pooled.

    0 <= next_token <= end: the next token whose hidden state is wanted, and the end of these tokens.
    """

    def __init__(self, num_tokens: int, wanted: Embed, default: Pooling) -> None:
        """`default`: the pooling if the request asks for none."""
        pooling = wanted.pooling or default
        self.next_token = num_tokens - 1 if pooling == "last" else 0
        self.end = 1 if pooling == "cls" else num_tokens
        self._dimensions = wanted.dimensions
        self._sum: NDArray[np.float64] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all wanted hidden states are pooled."""
        return self.next_token == self.end

    def add(self, first: int, rows: NDArray[np.float32]) -> None:
        """Add the hidden states of tokens from `first` on; those that are pooled already are skipped.

        rows: [num_tokens, hidden_size]
        """
        num_known = self.next_token - first
        if num_known < 0:
            raise InvariantError(f"hidden states start at token {first}, but token {self.next_token} is next")
        for start in range(num_known, len(rows), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE].astype(np.float64)
            # numpy adds rows one by one, so the sum does not depend on how steps and parts cut the prompt.
            self._sum = (part if self._sum is None else np.vstack((self._sum, part))).sum(axis=0)
        self.next_token = max(self.next_token, first + len(rows))

    def vector(self) -> NDArray[np.float32] | None:
        """Return the vector of length 1; None if the model computed NaN, infinity or only zeros.

        The mean and the sum have the same direction, so the sum is not divided.
        """
        if self._sum is None or not self.is_complete:
            raise InvariantError(f"token {self.next_token} of a prompt is not pooled yet")
        kept = self._sum[: self._dimensions]
        length = float(np.sqrt(np.sum(kept * kept)))
        return (kept / length).astype("<f4") if 0 < length < np.inf else None


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
