"""The draft of one sequence, and how often its drafts are right."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

SIZES = (2, 3, 4)
"""Lengths of the runs to look for, in tokens."""
_LONG = 8
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
_HASH_SHIFT = 20
_MAX_ENTRIES_LOG2 = 16
_ENTRIES_PER_TOKEN = 4 * len(SIZES)
_FEW = 12


class NgramDrafter:
    """Drafts the tokens that followed the last occurrence of a sequence's newest ones.

    That is prompt lookup decoding (A. Saxena, 2023). The drafter keeps the last position of each run of two, three and
    four tokens.

    Positions are in a hash table of fixed size; runs with the same entry overwrite each other. That only loses matches,
    because each match is compared with the tokens themselves.
    """

    def __init__(self, max_num_tokens: int) -> None:
        num_entries = 1 << min(_MAX_ENTRIES_LOG2, (_ENTRIES_PER_TOKEN * max_num_tokens).bit_length())
        self._mask = num_entries - 1
        self._table = array("i", bytes(4 * num_entries))
        """By hash, the position after the run; 0 for none."""
        self._tokens = array("i")
        self._last: list[int] = []
        """Entries of the runs at the end. They are written with the next token, or the end would find itself."""

    def __len__(self) -> int:
        return len(self._tokens)

    def push(self, token: int) -> None:
        """Add one token."""
        at = len(self._tokens)
        for entry in self._last:
            self._table[entry] = at
        self._tokens.append(token)
        self._last = self._entries_of(at + 1)

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Add tokens."""
        if len(tokens) <= _FEW:
            for token in tokens.tolist():
                self.push(token)
            return
        begin = len(self._tokens)
        self._tokens.frombytes(tokens.tobytes())
        self._enter(begin, len(self._tokens))
        self._last = self._entries_of(len(self._tokens))

    def find(self) -> tuple[int, int]:
        """Return the position after an earlier run like the last one, and the least length of that run.

        (0, 0) for no match; at most 8 tokens are compared.
        """
        tokens, last = self._tokens, self._last
        for i in range(len(last) - 1, -1, -1):
            size, at = SIZES[i], self._table[last[i]]
            if at >= size and tokens[at - size : at] == tokens[-size:]:
                is_long = size == SIZES[-1] and at >= _LONG and tokens[at - _LONG : at] == tokens[-_LONG:]
                return at, _LONG if is_long else size
        return 0, 0

    def following(self, at: int, count: int) -> list[int]:
        """Return `count` tokens from a position on; at the end of the sequence these tokens repeat."""
        found = self._tokens[at : at + count].tolist()
        return (found * (count // len(found) + 1))[:count]

    def num_common(self, at: int, since: int) -> int:
        """Return how many of the tokens from `since` on equal those from `at` on."""
        tokens, end, here = self._tokens, len(self._tokens), since
        while here < end and tokens[at] == tokens[here]:
            at, here = at + 1, here + 1
        return here - since

    def _entries_of(self, end: int) -> list[int]:
        """Return the table entries of the runs that end before a position, the shortest first."""
        tokens, mask = self._tokens, self._mask
        if end < SIZES[-1]:
            return []
        mixed = (tokens[end - 1] + 1) * _FACTORS[0] + (tokens[end - 2] + 1) * _FACTORS[1]
        longer = mixed + (tokens[end - 3] + 1) * _FACTORS[2]
        longest = longer + (tokens[end - 4] + 1) * _FACTORS[3]
        return [mixed >> _HASH_SHIFT & mask, longer >> _HASH_SHIFT & mask, longest >> _HASH_SHIFT & mask]

    def _enter(self, begin: int, end: int) -> None:
        """Enter the runs that end before each of these positions."""
        first = max(0, begin - SIZES[-1])
        tokens, table = np.array(self._tokens[first:end], dtype=np.int64), np.frombuffer(self._table, dtype=np.int32)
        for size in SIZES:
            ends = np.arange(max(begin, SIZES[-1]), end)
            mixed = sum((tokens[ends - first - i] + 1) * _FACTORS[i - 1] for i in range(1, size + 1))
            table[mixed >> _HASH_SHIFT & self._mask] = ends


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
