"""Norms of the hidden state, computed in float32."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Norm:
    """By the root of the mean square, or with a bias by mean and variance too (a layer norm)."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size of the weight]; returns its shape, in the weight's dtype."""
        wide, shape = x.float(), self.weight.shape
        if self.bias is None:
            return functional.rms_norm(wide, shape, eps=self.eps).to(self.weight.dtype) * self.weight
        normed = functional.layer_norm(wide, shape, self.weight.float(), self.bias.float(), self.eps)
        return normed.to(self.weight.dtype)
