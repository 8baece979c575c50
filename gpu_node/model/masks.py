"""Which tokens the rows of a step may choose, where that is written while the step already runs."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

_BITS = 32


class TokenMasks:
    """One row of bits for each sampling row that has a mask. A runner reads them only once they are written."""

    def __init__(self, is_masked: NDArray[np.bool_], vocab_size: int) -> None:
        """is_masked: [num_samples], which rows have a mask; until it is written it allows nothing."""
        self.rows = np.where(is_masked, np.cumsum(is_masked) - 1, -1).astype(np.int32)
        """[num_samples]: the row of `words` that a sampling row goes by, -1 where it may choose any token."""
        self.words = np.zeros((int(is_masked.sum()), -(-vocab_size // _BITS)), dtype=np.uint32)
        """[num_masked, vocab / 32]: a bit for each token, the lowest first."""
        self.written = np.zeros(1, dtype=np.int32)
        """Not 0 once all words are written, for those who look at memory."""
        self._all_written = threading.Event()

    def finish(self) -> None:
        """Say that all words are written."""
        self.written[0] = 1
        self._all_written.set()

    def wait(self) -> None:
        """Block until they are."""
        self._all_written.wait()
