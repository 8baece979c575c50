"""Draft the tokens that followed the last occurrence of the newest tokens.

Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from array import array

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
    """The last position of each run of two, three and four tokens of one sequence.

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
