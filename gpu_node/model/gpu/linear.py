"""The matrices of layers on a GPU, unquantized or quantized at load time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.arguments import Addend, NormWeights
from penstock.kernels.triton.blocks import multiply_blocks, quantize_blocks
from penstock.kernels.triton.few_rows import is_for_few, multiply_few
from penstock.kernels.triton.int4 import GROUP, multiply_int4, pack_int4, pair_scales
from penstock.kernels.triton.invariant import multiply_invariant
from penstock.kernels.triton.layers import Clamp, activate_quantized
from penstock.kernels.triton.norms import add_norm_quantized
from penstock.kernels.triton.products import (
    QuantizedRows,
    library_multiplies,
    multiply_by_library,
    multiply_scaled,
    quantize_vectors,
)

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
        if is_for_few(x, self.weight):
            return multiply_few(x.contiguous(), self.weight, self.bias)
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
        return cls(*quantize_vectors(weight.contiguous(), kept), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in]; returns [num_tokens, out]."""
        return self.of_quantized(quantize_vectors(x.contiguous(), self.weight.dtype), x.dtype)

    def of_quantized(self, rows: QuantizedRows, dtype: torch.dtype) -> Tensor:
        """Multiply rows that a kernel has quantized to the weight's dtype; returns [num_tokens, out] in `dtype`."""
        multiply = multiply_by_library if library_multiplies(rows.q, self.weight, dtype) else multiply_scaled
        product = multiply(*rows, self.weight, self.scales, dtype)
        return product if self.bias is None else product + self.bias

    def of_normed(self, residual: Tensor, delta: Addend | None, norm: NormWeights) -> Tensor:
        """Multiply the norm of `residual` plus `delta`, which is added in place."""
        return self.of_quantized(add_norm_quantized(residual, delta, norm, self.weight.dtype), norm.weight.dtype)

    def of_activated(self, x: Tensor, activation: str, *, gated: bool, clamp: Clamp | None = None) -> Tensor:
        """Multiply `gate_mul(x)` if gated, else `activate(x)`."""
        rows = activate_quantized(x, activation, self.weight.dtype, gated=gated, clamp=clamp)
        return self.of_quantized(rows, x.dtype)


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """x @ weight.T + bias, the weight in int4 with a scale and a minimum per 32 columns, x unquantized."""

    packed: Tensor
    pairs: Tensor
    """The scales and minima, from `pair_scales`."""
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Self:
        """Quantize a weight [out, in] to int4; bias: [out]."""
        packed, *scales = pack_int4(weight)
        return cls(packed, pair_scales(*scales), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in]; returns [num_tokens, out]."""
        product = multiply_int4(x.contiguous(), self.packed, self.pairs)
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """x @ weight.T + bias, in float8 with a scale for each 128 columns of a row, of the weight and of x."""

    weight: Tensor
    scales: Tensor
    """[columns / 128, out] float32"""
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in]; returns [num_tokens, out]."""
        return multiply_blocks(*quantize_blocks(x.contiguous()), self.weight, self.scales, self.bias, x.dtype)


KeptLinear: TypeAlias = PlainLinear | InvariantLinear | ScaledLinear | Int4Linear | BlockLinear
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


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """The embeddings of a vocabulary."""

    weight: Tensor
    """[vocab, hidden]"""

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the embeddings of token ids, [num_tokens, hidden]."""
        return functional.embedding(ids, self.weight)


HEAD_ROWS = 64
"""The head is padded to a multiple of this many rows. Logits of an odd vocabulary would be in unaligned rows."""


def padded_vocab(vocab: int) -> int:
    """Return the rows of the padded head of a vocabulary, which is also the width of its logits."""
    return -(-vocab // HEAD_ROWS) * HEAD_ROWS


def padded_head(weight: Tensor, quantization: str = "none", *, deterministic: bool = False) -> KeptLinear:
    """Return the product with a head [vocab, hidden], zero rows appended. The caller cuts off their logits.

    The head is float8 if the layers are quantized to float8, else plain: each decode step reads the whole head, so it
    counts like a layer's matrices.
    """
    make = linear_of("fp8" if quantization == "fp8" else "none", deterministic=deterministic)
    return make(pad_rows(weight), None)


def pad_rows(weight: Tensor, num_rows: int | None = None) -> Tensor:
    """Append zero rows up to `num_rows`, else up to `padded_vocab`; weight: [vocab, hidden]."""
    missing = (padded_vocab(len(weight)) if num_rows is None else num_rows) - len(weight)
    return functional.pad(weight, (0, 0, 0, missing)) if missing else weight


def can_pack_int4(*widths: int) -> bool:
    """Return whether int4's groups divide matrices with these numbers of columns."""
    return all(width % GROUP == 0 for width in widths)
