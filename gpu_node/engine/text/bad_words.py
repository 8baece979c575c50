"""Token sequences that must not be generated."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class BadWords:
    """The token sequences of a request's bad words, arranged so that a step looks at few of them.

    A sequence bans its last token after all its other tokens. So only the sequences whose token before the last one is
    the newest token of the text need a comparison.
    """

    def __init__(self, sequences: Iterable[tuple[int, ...]] = ()) -> None:
        self._always: list[int] = []
        """The sequences of one token."""
        self._after: dict[int, list[tuple[bytes, int]]] = {}
        """By the token before the last one: all tokens but the last as int32, and the last token."""
        self._max_tail = 0
        for *tail, last in sequences:
            if tail:
                self._after.setdefault(tail[-1], []).append((np.array(tail, dtype=np.int32).tobytes(), last))
                self._max_tail = max(self._max_tail, len(tail))
            else:
                self._always.append(last)

    def __bool__(self) -> bool:
        return bool(self._always or self._after)

    def banned_after(self, token_ids: NDArray[np.int32]) -> list[int]:
        """Return the ids that must not follow these tokens, of which there is at least one."""
        candidates = self._after.get(int(token_ids[-1]))
        if candidates is None:
            return self._always
        newest = token_ids[-self._max_tail :].tobytes()
        return self._always + [last for tail, last in candidates if newest.endswith(tail)]


NO_BAD_WORDS = BadWords()
