"""The arguments of the norms of the residual stream: a norm's weights, and rows to add before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class NormWeights(Protocol):
    """An RMS norm, or a layer norm if it has a bias. With an empty weight it only converts to its dtype."""

    @property
    def weight(self) -> Tensor:
        """[hidden]."""

    @property
    def bias(self) -> Tensor | None:
        """[hidden]."""

    @property
    def eps(self) -> float:
        """Added to the mean square."""

    @property
    def offset(self) -> float:
        """Added to the weight, in float32."""


@dataclass(frozen=True, slots=True)
class Addend:
    """Rows that are still to be added to the residual stream."""

    rows: Tensor
    """[num_tokens, hidden]; rows must be contiguous."""
    norm: NormWeights | None = None
    """An RMS norm of the rows, applied first."""
    scale: float = 1.0
    """Multiplies the rows, after their norm."""
