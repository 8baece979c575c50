"""The matrices of layers on a GPU, unquantized or quantized at load time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.triton.invariant import multiply_invariant
from penstock.kernels.triton.products import GROUP, multiply_int4, multiply_scaled, pack_int4, quantise_vectors

SCALED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Formats with one scale per weight row. Their activations are quantized with one scale per token."""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """x @ weight.T + bias."""

    weight: Tensor
    """[out, in]"""
    bias: Tensor | None
    """[out]"""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in]; returns [num_tokens, out]."""
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class InvariantLinear:
    """x @ weight.T + bias, a row's result independent of the other rows, as `deterministic` wants it."""

    weight: Tensor
    """[out, in]"""
    bias: Tensor | None
    """[out]"""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in]; returns [num_tokens, out]."""
        return multiply_invariant(x.contiguous(), self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class ScaledLinear:
    """x @ weight.T + bias, with weights and activations in int8 or float8."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, kept: torch.dtype) -> Self:
        """Quantize a weight [out, in] to the dtype `kept`; bias: [out]."""
        return cls(*quantise_vectors(weight.contiguous(), kept), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in]; returns [num_tokens, out]."""
        q, scales = quantise_vectors(x.contiguous(), self.weight.dtype)
        product = multiply_scaled(q, scales, self.weight, self.scales, x.dtype)
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """x @ weight.T + bias, the weight in int4 with a scale and a minimum per 32 columns, x unquantized."""

    packed: Tensor
    scales: Tensor
    minima: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Quantize a weight [out, in] to int4; bias: [out]."""
        return cls(*pack_int4(weight), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in]; returns [num_tokens, out]."""
        product = multiply_int4(x.contiguous(), self.packed, self.scales, self.minima)
        return product if self.bias is None else product + self.bias


KeptLinear: TypeAlias = PlainLinear | InvariantLinear | ScaledLinear | Int4Linear
"""A matrix of a layer; its dataclass fields are all of its tensors."""


def linear_of(quantization: str, *, deterministic: bool = False) -> Callable[[Tensor, Tensor | None], KeptLinear]:
    """Return the constructor of a layer's matrix; quantization is `none`, `int4` or a key of SCALED.

    deterministic: a row's result does not depend on the other rows. Sums of int8 are exact, so they never do.
    """
    if quantization == "none":
        return InvariantLinear if deterministic else PlainLinear
    if quantization == "int4":
        return Int4Linear.of
    return lambda weight, bias: ScaledLinear.of(weight, bias, SCALED[quantization])


HEAD_ROWS = 64
"""A head is padded to a multiple of so many rows: logits of an odd vocabulary would lie in unaligned rows."""


def padded_head(weight: Tensor, *, deterministic: bool = False) -> PlainLinear | InvariantLinear:
    """Return the product with a head [vocab, hidden], zero rows appended. The caller cuts off their logits."""
    missing = -len(weight) % HEAD_ROWS
    padded = functional.pad(weight, (0, 0, 0, missing)) if missing else weight
    return (InvariantLinear if deterministic else PlainLinear)(padded, None)


def can_pack_int4(*widths: int) -> bool:
    """Return whether int4's groups divide matrices with these numbers of columns."""
    return all(width % GROUP == 0 for width in widths)
