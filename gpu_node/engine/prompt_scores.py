"""How much of a prompt is scored: of each token behind the first, how likely it was behind those before it."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from penstock.contract.errors import InvariantError
from penstock.contract.logprobs import TokenLogprobs
from penstock.gpu_node.model.protocol import Logprobs


class PromptScores:
    """Of one request, whose choices share it, whichever of them computes the prompt. What is scored once stays.

    0 <= num_scored <= num_to_score: tokens behind which it is known how likely the next one was.
    """

    def __init__(self, prompt: Items[int], num_logprobs: int) -> None:
        self.prompt = np.array(prompt, dtype=np.int32)
        self.num_logprobs = num_logprobs
        self.num_scored = 0
        self.num_to_score = len(prompt) - 1
        self.parts: list[Logprobs] = []
        """Rows that are not in `records` yet: those of the newest step."""
        self.records: list[TokenLogprobs] = []

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to score."""
        return self.num_scored == self.num_to_score

    def add(self, first: int, rows: Logprobs) -> None:
        """Take in rows behind the tokens from `first` on; what was known before is known already."""
        num_known = self.num_scored - first
        if num_known < 0:
            raise InvariantError(f"tokens from {first} on are scored, but only {self.num_scored} before them")
        self.parts.append(Logprobs(rows.token_ids[num_known:], rows.values[num_known:]))
        self.num_scored = max(self.num_scored, first + len(rows.values))
