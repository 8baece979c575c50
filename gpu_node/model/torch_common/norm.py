"""Norms of the hidden state, computed in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm, or a layer norm if it has a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float = 0.0
    """Added to the weight of an RMS norm, in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x, [..., size of the weight], and return it in the weight's dtype."""
        wide, shape = x.float(), self.weight.shape
        if self.offset:
            gains = self.weight.float() + self.offset
            return functional.rms_norm(wide, shape, gains, self.eps).to(self.weight.dtype)
        if self.bias is None:
            return functional.rms_norm(wide, shape, eps=self.eps).to(self.weight.dtype) * self.weight
        normed = functional.layer_norm(wide, shape, self.weight.float(), self.bias.float(), self.eps)
        return normed.to(self.weight.dtype)

    def of_mean_square(self, x: Tensor, mean_square: Tensor) -> Tensor:
        """Return x as an RMS norm of a longer vector does, of which x is a part.

        x: [..., size of the weight]; mean_square: [..., 1], over the whole vector.
        """
        normed = x.float() * torch.rsqrt(mean_square + self.eps)
        if self.offset:
            return (normed * (self.weight.float() + self.offset)).to(self.weight.dtype)
        return normed.to(self.weight.dtype) * self.weight


class NoNorm(Norm):
    """Takes the place of a norm that the model does not have."""

    def __init__(self, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """dtype: of the returned rows."""
        super().__init__(torch.empty(0, dtype=dtype, device=device), None, 0.0)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x in the dtype of the weights."""
        return x.to(self.weight.dtype)
