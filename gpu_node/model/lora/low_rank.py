"""What an adapter is made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one part of a layer's matrix: up @ down."""

    part: int
    """Which of the parts that the spec names."""
    down: NDArray[np.float32]
    """[rank, columns]"""
    up: NDArray[np.float32]
    """[rows, rank], the adapter's factor included."""
