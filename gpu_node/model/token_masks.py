"""Bit masks of the tokens that a row of a step may choose."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

_MASK_BITS = 32


class TokenMasks:
    """Bit masks of the tokens that some rows of a step may choose.

    The engine writes the masks while the step already runs. A runner waits for them before it samples.
    """

    def __init__(self, is_masked: NDArray[np.bool_], vocab_size: int) -> None:
        """is_masked: [num_samples], whether a row has a mask. A mask allows no token until it is written."""
        self.rows = np.where(is_masked, np.cumsum(is_masked) - 1, -1).astype(np.int32)
        """[num_samples]: the row of `words` that masks a sampling row; -1 where the row may choose any token."""
        self.words = np.zeros((int(is_masked.sum()), -(-vocab_size // _MASK_BITS)), dtype=np.uint32)
        """[num_masked, vocab / 32]: one bit per token, lowest bit first; 1 allows the token."""
        self.written = np.zeros(1, dtype=np.int32)
        """[1]: nonzero once all words are written. Native kernels poll this memory."""
        self._all_written = threading.Event()

    def finish(self) -> None:
        """Signal that all words are written."""
        self.written[0] = 1
        self._all_written.set()

    def wait(self) -> None:
        """Block until all words are written."""
        self._all_written.wait()
