"""What one sequence would say next, and how often that is right."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.engine.speculative.ngram import NgramDrafter

_CLASS_OF = (0, 0, 0, 1, 2, 2, 2, 2)
_LONGEST = 3
"""Runs of up to two, of three, of four to seven and of more tokens are classes of their own."""
_FIRST_ODDS = (0.25, 0.4, 0.6, 0.85)
"""That what followed a run follows it again, by its class, before anything is known."""
_FIRST_TRIES = 8.0
_COMMON_TRIES = 3.0
"""What all sequences' odds count for in one's own."""
_FADE = 0.95
_COMMON_FADE = 0.998
_LEAST_CHANCE = 0.2


class Odds:
    """How often lately what followed a run followed it again, by the run's class."""

    def __init__(self, odds: Items[float], tries: float, fade: float) -> None:
        self._stood = [one * tries for one in odds]
        self._tries = [tries] * len(odds)
        self._fade = fade

    def note(self, of_class: int, *, stood: bool) -> None:
        """It did, or did not."""
        self._stood[of_class] = self._stood[of_class] * self._fade + stood
        self._tries[of_class] = self._tries[of_class] * self._fade + 1

    def among(self, of_class: int, other: float) -> float:
        """The odds, where `other` counts as a few tries more."""
        return (self._stood[of_class] + _COMMON_TRIES * other) / (self._tries[of_class] + _COMMON_TRIES)


def common_odds() -> Odds:
    """Of all sequences, before anything is known of any."""
    return Odds(_FIRST_ODDS, _FIRST_TRIES, _COMMON_FADE)


class Drafter:
    """What one sequence would draft. It learns how often it is right whether or not that is computed."""

    def __init__(self, max_num_tokens: int, common: Odds) -> None:
        """`common` are the odds of all sequences."""
        self.lookup = NgramDrafter(max_num_tokens)
        self._own = Odds((0.0,) * len(_FIRST_ODDS), 0.0, _FADE)
        self._common = common
        self.has_hopes = False
        """Whether the last look found something."""
        self._at = self._length = 0
        """What it found."""

    def look(self, news: NDArray[np.int32], least: float) -> bool:
        """Look for what comes behind tokens said since the last look; whether the first of it is right by such odds."""
        lookup, since = self.lookup, len(self.lookup)
        lookup.extend(news)
        if self._at:
            self._learn(since)
        self._at, self._length = lookup.find()
        self.has_hopes = self._at > 0 and self._odds(self._length) > least
        return self.has_hopes

    def chances(self, most: int) -> list[float]:
        """That the first, the first two, ... of up to `most` tokens are right, as long as it is at all likely."""
        chances, chance = [], 1.0
        for length in range(self._length, self._length + most):
            chance *= self._odds(length)
            if chance < _LEAST_CHANCE:
                break
            chances.append(chance)
        return chances

    def draft(self, count: int) -> list[int]:
        """So many tokens that the sequence will probably say next."""
        return self.lookup.following(self._at, count)

    def _learn(self, since: int) -> None:
        num_right, num_said = self.lookup.num_common(self._at, since), len(self.lookup) - since
        for i in range(min(num_right + 1, num_said)):
            of_class = _class_of(self._length + i)
            self._own.note(of_class, stood=i < num_right)
            self._common.note(of_class, stood=i < num_right)

    def _odds(self, length: int) -> float:
        of_class = _class_of(length)
        return self._own.among(of_class, self._common.among(of_class, _FIRST_ODDS[of_class]))


def _class_of(length: int) -> int:
    return _CLASS_OF[length] if length < len(_CLASS_OF) else _LONGEST
