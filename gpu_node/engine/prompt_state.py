"""What a request keeps of its prompt while the prompt is computed: its scores and its embedding."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import InvariantError
from penstock.contract.logprobs import TokenLogprobs
from penstock.gpu_node.model.protocol import Logprobs

if TYPE_CHECKING:
    from penstock.contract.tasks import Embed, Pooling


class PromptScores:
    """Scores of one request's prompt, shared by its choices. Scored tokens stay scored.

    0 <= num_scored <= num_to_score: the number of tokens with a known log-probability of the next one.
    """

    def __init__(self, prompt: Items[int], num_logprobs: int) -> None:
        self.prompt = np.array(prompt, dtype=np.int32)
        self.num_logprobs = num_logprobs
        self.num_scored = 0
        self.num_to_score = len(prompt) - 1
        self.parts: list[Logprobs] = []
        """Rows of the newest step, not yet converted to `records`."""
        self.records: list[TokenLogprobs] = []

    @property
    def is_complete(self) -> bool:
        """Whether the whole prompt is scored."""
        return self.num_scored == self.num_to_score

    def add(self, first: int, rows: Logprobs) -> None:
        """Add the rows for tokens from `first` on; rows that are known already are skipped."""
        num_known = self.num_scored - first
        if num_known < 0:
            raise InvariantError(f"scores start at token {first}, but only {self.num_scored} tokens are scored")
        self.parts.append(Logprobs(rows.token_ids[num_known:], rows.values[num_known:]))
        self.num_scored = max(self.num_scored, first + len(rows.values))


_ROWS_AT_ONCE = 256
"""Hidden states that are converted to float64 at once."""


class PooledPrompt:
    """Pools the hidden states of one request's prompt to one vector. A pooled token stays pooled.

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
