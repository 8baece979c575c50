"""The draft of one sequence, and how often its drafts are right."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.engine.speculative.ngram import NgramDrafter

_CLASS_OF = (0, 0, 0, 1, 2, 2, 2, 2)
_LONGEST = 3
"""Runs of up to two, of three, of four to seven and of more tokens are classes of their own."""
_FIRST_ODDS = (0.25, 0.4, 0.6, 0.85)
"""Assumed odds, for each class, that the same token follows a run again, before any are observed."""
_FIRST_TRIES = 8.0
_COMMON_TRIES = 3.0
"""The weight of all sequences' odds in those of one sequence, in tries."""
_FADE = 0.95
_COMMON_FADE = 0.998
_MIN_CHANCE = 0.2


class Odds:
    """How often, of late, the same token followed a run again, for each class of run."""

    def __init__(self, odds: Items[float], tries: float, fade: float) -> None:
        self._num_right = [one * tries for one in odds]
        self._tries = [tries] * len(odds)
        self._fade = fade

    def note(self, of_class: int, *, was_right: bool) -> None:
        """Record one outcome."""
        self._num_right[of_class] = self._num_right[of_class] * self._fade + was_right
        self._tries[of_class] = self._tries[of_class] * self._fade + 1

    def among(self, of_class: int, other: float) -> float:
        """Return the odds, with `other` counted as a few more tries."""
        return (self._num_right[of_class] + _COMMON_TRIES * other) / (self._tries[of_class] + _COMMON_TRIES)


def common_odds() -> Odds:
    """Return the odds over all sequences, before any are observed."""
    return Odds(_FIRST_ODDS, _FIRST_TRIES, _COMMON_FADE)


class Drafter:
    """Drafts tokens for one sequence. It learns how often it is right, whether or not the draft is computed."""

    def __init__(self, max_num_tokens: int, common: Odds) -> None:
        """`common` are the odds over all sequences."""
        self.lookup = NgramDrafter(max_num_tokens)
        self._own = Odds((0.0,) * len(_FIRST_ODDS), 0.0, _FADE)
        self._common = common
        self.has_match = False
        """Whether the last look found a draft."""
        self._at = self._length = 0
        """Position and length of the run that was found."""

    def look(self, new_tokens: NDArray[np.int32], min_odds: float) -> bool:
        """Look for a draft after the new tokens. Return whether its first token is right with odds above `min_odds`."""
        lookup, since = self.lookup, len(self.lookup)
        lookup.extend(new_tokens)
        if self._at:
            self._learn(since)
        self._at, self._length = lookup.find()
        self.has_match = self._at > 0 and self._odds(self._length) > min_odds
        return self.has_match

    def chances(self, limit: int) -> list[float]:
        """Return the chances that the first, the first two, … up to `limit` tokens are right, while that is likely."""
        chances, chance = [], 1.0
        for length in range(self._length, self._length + limit):
            chance *= self._odds(length)
            if chance < _MIN_CHANCE:
                break
            chances.append(chance)
        return chances

    def draft(self, count: int) -> list[int]:
        """Return `count` tokens that probably come next."""
        return self.lookup.following(self._at, count)

    def _learn(self, since: int) -> None:
        num_right, num_new = self.lookup.num_common(self._at, since), len(self.lookup) - since
        for i in range(min(num_right + 1, num_new)):
            of_class = _class_of(self._length + i)
            self._own.note(of_class, was_right=i < num_right)
            self._common.note(of_class, was_right=i < num_right)

    def _odds(self, length: int) -> float:
        of_class = _class_of(length)
        return self._own.among(of_class, self._common.among(of_class, _FIRST_ODDS[of_class]))


def _class_of(length: int) -> int:
    return _CLASS_OF[length] if length < len(_CLASS_OF) else _LONGEST
