"""Norms of the hidden state, computed in float32."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm, or a layer norm if it has a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x, [..., size of the weight], and return it in the weight's dtype."""
        wide, shape = x.float(), self.weight.shape
        if self.bias is None:
            return functional.rms_norm(wide, shape, eps=self.eps).to(self.weight.dtype) * self.weight
        normed = functional.layer_norm(wide, shape, self.weight.float(), self.bias.float(), self.eps)
        return normed.to(self.weight.dtype)
