"""What a request keeps of its prompt while the prompt is computed: its scores and its embedding."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.protocol import Logprobs

if TYPE_CHECKING:
    from penstock.contract.output import TokenLogprobs
    from penstock.contract.tasks import Embed, Pooling


class PromptResults:
    """What a request wants of its prompt's tokens, besides their keys and values: scores or an embedding.

    A token whose result is known stays known. 0 <= next_token <= end: the next token whose result is wanted, and the
    end of these tokens.
    """

    def __init__(self, next_token: int, end: int) -> None:
        self.next_token = next_token
        self.end = end

    @property
    def is_complete(self) -> bool:
        """Whether the results of all wanted tokens are known."""
        return self.next_token == self.end

    def take(self, first: int, num_rows: int) -> int:
        """Count the results of tokens from `first` on. Return how many of them were known already."""
        num_known = self.next_token - first
        if num_known < 0:
            raise InvariantError(f"results start at prompt token {first}, but token {self.next_token} is next")
        self.next_token = max(self.next_token, first + num_rows)
        return num_known


class PromptScores(PromptResults):
    """Scores of one request's prompt, shared by its choices: the log-probability of each token's next one."""

    def __init__(self, prompt: Items[int], num_logprobs: int) -> None:
        super().__init__(0, len(prompt) - 1)
        self.prompt = np.array(prompt, dtype=np.int32)
        self.num_logprobs = num_logprobs
        self.parts: list[Logprobs] = []
        """Rows of the newest step, not yet converted to `records`."""
        self.records: list[TokenLogprobs] = []

    def add(self, first: int, rows: Logprobs) -> None:
        """Add the rows for tokens from `first` on; rows that are known already are skipped."""
        num_known = self.take(first, len(rows.values))
        self.parts.append(Logprobs(rows.token_ids[num_known:], rows.values[num_known:]))


_ROWS_AT_ONCE = 256
"""Hidden states that are converted to float64 at once."""


class PooledPrompt(PromptResults):
    """Pools the hidden states of one request's prompt to one vector."""

    def __init__(self, num_tokens: int, wanted: Embed, default: Pooling) -> None:
        """`default`: the pooling if the request asks for none."""
        pooling = wanted.pooling or default
        super().__init__(num_tokens - 1 if pooling == "last" else 0, 1 if pooling == "cls" else num_tokens)
        self._dimensions = wanted.dimensions
        self._sum: NDArray[np.float64] | None = None

    def add(self, first: int, rows: NDArray[np.float32]) -> None:
        """Add the hidden states of tokens from `first` on; those that are pooled already are skipped.

        rows: [num_tokens, hidden_size]
        """
        for start in range(self.take(first, len(rows)), len(rows), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE].astype(np.float64)
            # numpy adds rows one by one, so the sum does not depend on how steps and parts cut the prompt.
            self._sum = (part if self._sum is None else np.vstack((self._sum, part))).sum(axis=0)

    def vector(self) -> NDArray[np.float32] | None:
        """Return the vector of length 1; None if the model computed NaN, infinity or only zeros.

        The mean and the sum have the same direction, so the sum is not divided.
        """
        if self._sum is None or not self.is_complete:
            raise InvariantError(f"token {self.next_token} of a prompt is not pooled yet")
        kept = self._sum[: self._dimensions]
        length = float(np.sqrt(np.sum(kept * kept)))
        return (kept / length).astype("<f4") if 0 < length < np.inf else None
