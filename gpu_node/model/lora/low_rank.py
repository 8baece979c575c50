"""The low-rank terms that an adapter consists of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank term up @ down that an adapter adds to one part of a layer's matrix."""

    part: int
    """The index of the part in `ModelSpec.parts_of`."""
    down: NDArray[np.float32]
    """[rank, columns]"""
    up: NDArray[np.float32]
    """[rows, rank], multiplied by the adapter's scaling factor."""
