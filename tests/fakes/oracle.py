"""A drafter that knows the coming tokens and makes mistakes at times."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.engine.speculative.draft_cost import StepCost
from penstock.gpu_node.engine.speculative.drafter import Drafter, common_odds
from penstock.gpu_node.engine.speculative.drafts import DraftBudget


class Foresight(Drafter):
    """Drafts from the first of the oracle's texts that begins with the sequence's tokens, often with a mistake."""

    def __init__(self, max_num_tokens: int, oracle: Oracle) -> None:
        super().__init__(max_num_tokens, common_odds())
        self._oracle = oracle
        self._next: list[int] = []

    def look(self, new_tokens: NDArray[np.int32], min_odds: float) -> bool:
        """Always report that drafting is worthwhile."""
        self.lookup.extend(new_tokens)
        so_far = self.lookup.following(0, len(self.lookup))
        text = next((text for text in self._oracle.texts if list(text[: len(so_far)]) == so_far), so_far)
        self._next = list(text[len(so_far) :])
        self.has_match = True
        return True

    def chances(self, most: int) -> list[float]:
        """Return chances for some of the coming tokens."""
        return [1.0] * min(self._oracle.rng.randint(0, most), len(self._next))

    def draft(self, count: int) -> list[int]:
        """Return the coming tokens, sometimes with a mistake."""
        draft, rng = self._next[:count], self._oracle.rng
        if rng.random() < 0.4:
            draft[rng.randrange(count)] = rng.randrange(3, 300)
        return draft


class Oracle(DraftBudget):
    """A drafting policy that gives drafts to every sequence that may draft."""

    def __init__(self) -> None:
        super().__init__(6, StepCost())
        self.texts: Sequence[Sequence[int]] = ()
        """Prompts and outputs."""
        self.rng = random.Random(0)

    def drafter(self, max_num_tokens: int) -> Drafter:
        """Return a drafter that knows the coming tokens."""
        return Foresight(max_num_tokens, self)

    def needs(self, num_decoding: int, most: int) -> list[float]:
        """Return zero: every draft is worth its cost."""
        return [0.0] * min(most, num_decoding * self.max_draft_tokens)
