"""What a sequence probably says next: what followed when it last said the same few tokens.

Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

_SIZES = (2, 3, 4)
_LONG = 8
MATCHES = (*_SIZES, _LONG)
"""How many last tokens a find may have in common with the end of a sequence, at least."""
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)
_HASH_SHIFT = 20
_MAX_PLACES_LOG2 = 16
_PLACES_PER_TOKEN = 4 * len(_SIZES)
_FEW = 12


class PromptLookup:
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
        self._num_indexed = 1
        """Tokens whose followers are known; fewer than there are, or the end would find itself."""

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Take in what a sequence said since."""
        self._tokens.frombytes(tokens.tobytes())
        begin, end = self._num_indexed + 1, len(self._tokens)
        if end - begin > _FEW:
            self._index_many(begin, end)
        else:
            for at in range(begin, end):
                for place in self._places_of(at):
                    self._places[place] = at
        self._num_indexed = max(self._num_indexed, end - 1)

    def find(self) -> tuple[int, int]:
        """Where what followed a run like the last one begins, and which of MATCHES the run is; (0, 0) for none."""
        tokens, end = self._tokens, len(self._tokens)
        places = self._places_of(end)
        for i in range(len(places) - 1, -1, -1):
            size, at = _SIZES[i], self._places[places[i]]
            if at >= size and tokens[at - size : at] == tokens[end - size :]:
                is_long = size == _SIZES[-1] and at >= _LONG and tokens[at - _LONG : at] == tokens[end - _LONG :]
                return at, MATCHES.index(_LONG if is_long else size)
        return 0, 0

    def following(self, at: int, count: int) -> list[int]:
        """The tokens from a place on; behind the last one the same run again."""
        found = self._tokens[at : at + count].tolist()
        return (found * (count // len(found) + 1))[:count]

    def _places_of(self, at: int) -> list[int]:
        """Places of the runs that end before a token, the shortest first."""
        tokens, places, mixed = self._tokens, [], 0
        for i in range(1, min(at, _SIZES[-1]) + 1):
            mixed += (tokens[at - i] + 1) * _FACTORS[i - 1]
            if i >= _SIZES[0]:
                places.append(mixed >> _HASH_SHIFT & self._mask)
        return places

    def _index_many(self, begin: int, end: int) -> None:
        first = max(0, begin - _SIZES[-1])
        tokens, places = np.array(self._tokens[first:], dtype=np.int64), np.frombuffer(self._places, dtype=np.int32)
        for size in _SIZES:
            ends = np.arange(max(begin, size), end)
            mixed = sum((tokens[ends - first - i] + 1) * _FACTORS[i - 1] for i in range(1, size + 1))
            places[mixed >> _HASH_SHIFT & self._mask] = ends
