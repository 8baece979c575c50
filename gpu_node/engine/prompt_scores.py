"""Track how much of a prompt is scored: the log-probability of each token given the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from penstock.contract.errors import InvariantError
from penstock.contract.output import TokenLogprobs
from penstock.gpu_node.model.protocol import Logprobs


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
