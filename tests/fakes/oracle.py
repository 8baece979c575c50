"""Drafts from somebody who knows what will be said, and is wrong at times."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.engine.speculation import Drafter, Speculation


class Oracle(Speculation):
    """Whoever may draft does: from the first of `texts` that goes on as it does, often with a mistake."""

    def __init__(self) -> None:
        super().__init__(max_draft_tokens=6)
        self.texts: Sequence[Sequence[int]] = ()
        """Prompts and outputs."""
        self.rng = random.Random(0)

    def begin(self, num_decoding: int) -> float:
        """Every draft pays."""
        return 0.0

    def on_trial(self, num_decoding: int) -> set[int]:
        """Nobody has to be."""
        return set()

    def draft(self, drafter: Drafter, news: NDArray[np.int32], room: int, least_odds: float) -> list[int]:
        """Some of what comes next."""
        drafter.lookup.extend(news)
        so_far = drafter.lookup.following(0, len(drafter.lookup))
        text = next((text for text in self.texts if list(text[: len(so_far)]) == so_far), so_far)
        draft = list(text[len(so_far) : len(so_far) + self.rng.randint(0, min(room, self.max_draft_tokens))])
        if draft and self.rng.random() < 0.4:
            draft[self.rng.randrange(len(draft))] = self.rng.randrange(3, 300)
        return draft
