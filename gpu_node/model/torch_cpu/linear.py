"""A matrix product whose weight lies as this processor multiplies it fastest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """x @ weight.T + bias. Prepacks the weight where it can, and then keeps no other copy of it.

    Packed by oneDNN, SmolLM2's bfloat16 products take 8 ms instead of 12 for one token and 27 instead of 32 for 64:
    `functional.linear` rearranges the weight again at every call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out, in]; bias: [out]."""
        self._bias = bias
        self._prepacked = can_prepack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._prepacked else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in], possibly none; returns [num_tokens, out]."""
        if self._prepacked:
            return _multiply_prepacked(x, self._weight, self._bias)
        return functional.linear(x, self._weight, self._bias)


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """The products of matrices that are parts of one, their outputs side by side."""

    parts: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in]; returns [num_tokens, all outputs]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


@cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Whether weights of `dtype` can be prepacked here, found by trying one.

    The operations are those that torch's own compiler emits, but not part of its public interface: a torch without
    them is no error.
    """
    if dtype is not torch.bfloat16 or not torch.cpu._is_avx512_bf16_supported():
        return False
    weight = torch.eye(32, dtype=dtype)
    try:
        product = _multiply_prepacked(weight, torch.ops.mkldnn._reorder_linear_weight(weight), None)
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(product, weight)


def _multiply_prepacked(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
