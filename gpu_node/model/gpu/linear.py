"""Matrices of few bits on a card, quantised as they are loaded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.gpu_node.model.layers import Product
from penstock.gpu_node.model.linear import Linear
from penstock.kernels.triton.products import GROUP, multiply_int4, multiply_scaled, pack_int4, quantise_vectors

SCALED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Formats with a scale for each row of weights, whose activations are quantised row by row too."""


class ScaledLinear:
    """x @ weight.T + bias in int8 or float8."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kept: torch.dtype) -> None:
        """weight: [out, in]; bias: [out]."""
        self._weight, self._scales = quantise_vectors(weight.contiguous(), kept)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in]; returns [num_tokens, out]."""
        q, scales = quantise_vectors(x.contiguous(), self._weight.dtype)
        product = multiply_scaled(q, scales, self._weight, self._scales, x.dtype)
        return product if self._bias is None else product + self._bias


class Int4Linear:
    """x @ weight.T + bias, the weight in int4 with a scale and a minimum for each 32 columns, x as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [out, in]; bias: [out]."""
        self._packed = pack_int4(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in]; returns [num_tokens, out]."""
        product = multiply_int4(x.contiguous(), *self._packed)
        return product if self._bias is None else product + self._bias


def linear_of(quantization: str) -> Callable[[Tensor, Tensor | None], Product]:
    """What keeps a layer's matrix: quantization is `none`, `int4`, or of SCALED."""
    if quantization == "none":
        return Linear
    if quantization == "int4":
        return Int4Linear
    return lambda weight, bias: ScaledLinear(weight, bias, SCALED[quantization])


def can_pack_int4(*widths: int) -> bool:
    """Whether matrices of so many columns are whole groups."""
    return all(width % GROUP == 0 for width in widths)
