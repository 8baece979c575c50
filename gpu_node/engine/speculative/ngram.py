"""What a sequence probably says next: what followed when it last said the same few tokens.

Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

SIZES = (2, 3, 4)
"""Tokens of the runs that are looked for."""
_LONG = 8
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
_HASH_SHIFT = 20
_MAX_PLACES_LOG2 = 16
_PLACES_PER_TOKEN = 4 * len(SIZES)
_FEW = 12


class NgramDrafter:
    """The last place of each run of two, three and four tokens of one sequence.

    Places stand in a table of fixed size by hash; runs that share an entry forget each other. That only loses finds,
    because a find is compared with the tokens themselves.
    """

    def __init__(self, max_num_tokens: int) -> None:
        num_places = 1 << min(_MAX_PLACES_LOG2, (_PLACES_PER_TOKEN * max_num_tokens).bit_length())
        self._mask = num_places - 1
        self._places = array("i", bytes(4 * num_places))
        """By hash, where what followed a run begins; 0 for none."""
        self._tokens = array("i")
        self._last: list[int] = []
        """Places of the runs at the end, which are only entered once more is said, or the end would find itself."""

    def __len__(self) -> int:
        return len(self._tokens)

    def push(self, token: int) -> None:
        """Take in the one token that a sequence said since."""
        at = len(self._tokens)
        for place in self._last:
            self._places[place] = at
        self._tokens.append(token)
        self._last = self._places_of(at + 1)

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Take in what it said since."""
        if len(tokens) <= _FEW:
            for token in tokens.tolist():
                self.push(token)
            return
        begin = len(self._tokens)
        self._tokens.frombytes(tokens.tobytes())
        self._enter(begin, len(self._tokens))
        self._last = self._places_of(len(self._tokens))

    def find(self) -> tuple[int, int]:
        """Where what followed a run like the last one begins, and of how many tokens, at least, the run is.

        (0, 0) for none; 8 tokens are the most that are compared.
        """
        tokens, last = self._tokens, self._last
        for i in range(len(last) - 1, -1, -1):
            size, at = SIZES[i], self._places[last[i]]
            if at >= size and tokens[at - size : at] == tokens[-size:]:
                is_long = size == SIZES[-1] and at >= _LONG and tokens[at - _LONG : at] == tokens[-_LONG:]
                return at, _LONG if is_long else size
        return 0, 0

    def following(self, at: int, count: int) -> list[int]:
        """The tokens from a place on; behind the last one the same run again."""
        found = self._tokens[at : at + count].tolist()
        return (found * (count // len(found) + 1))[:count]

    def num_common(self, at: int, since: int) -> int:
        """How many of the tokens from `since` on are those from `at` on."""
        tokens, end, here = self._tokens, len(self._tokens), since
        while here < end and tokens[at] == tokens[here]:
            at, here = at + 1, here + 1
        return here - since

    def _places_of(self, end: int) -> list[int]:
        """Places of the runs that end before a token, the shortest first."""
        tokens, mask = self._tokens, self._mask
        if end < SIZES[-1]:
            return []
        mixed = (tokens[end - 1] + 1) * _FACTORS[0] + (tokens[end - 2] + 1) * _FACTORS[1]
        longer = mixed + (tokens[end - 3] + 1) * _FACTORS[2]
        longest = longer + (tokens[end - 4] + 1) * _FACTORS[3]
        return [mixed >> _HASH_SHIFT & mask, longer >> _HASH_SHIFT & mask, longest >> _HASH_SHIFT & mask]

    def _enter(self, begin: int, end: int) -> None:
        """Enter the runs that end before each of these tokens."""
        first = max(0, begin - SIZES[-1])
        tokens, places = np.array(self._tokens[first:end], dtype=np.int64), np.frombuffer(self._places, dtype=np.int32)
        for size in SIZES:
            ends = np.arange(max(begin, SIZES[-1]), end)
            mixed = sum((tokens[ends - first - i] + 1) * _FACTORS[i - 1] for i in range(1, size + 1))
            places[mixed >> _HASH_SHIFT & self._mask] = ends
