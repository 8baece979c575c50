"""Products with quantized matrices, and how such matrices are made from floats; and products with LoRA's matrices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def multiply_scaled(q: Tensor, q_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the products of quantized rows with a matrix quantized the same way, in int8 or float8_e4m3fn.

    q: [rows, columns]; weight: [outputs, columns]; q_scales: [rows], weight_scales: [outputs], both float32; returns
    [rows, outputs] in `dtype`.
    """
    exact = q.double() @ weight.double().T
    return (exact * q_scales.double()[:, None] * weight_scales.double()).to(dtype)


def multiply_int4(x: Tensor, packed: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """Return x @ weight.T for an int4 weight: groups of 32 columns are scale * q + minimum with q in [0, 15].

    x: [rows, columns]; packed: [outputs, columns / 2] in uint8; byte i of a group holds column i in its low half and
    column i + 16 in its high half (GGUF's order); scales, minima: [outputs, columns / 32] in float16. Returns
    [rows, outputs].
    """
    groups = packed.view(len(packed), -1, 16)
    q = torch.cat((groups & 15, groups >> 4), dim=-1).float()
    weight = q * scales.float().unsqueeze(-1) + minima.float().unsqueeze(-1)
    return (x.float() @ weight.flatten(1).T).to(x.dtype)


def add_lora(out: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor) -> None:
    """Add the product of each row's adapter, x @ down.T @ up.T, in place (LoRA, arXiv:2106.09685).

    out: [rows, outputs]; x: [rows, columns]; down: [num_adapters, rank, columns]; up: [num_adapters, outputs, rank];
    adapters: [rows], -1 for none.
    """
    for row, adapter in enumerate(adapters.tolist()):
        if adapter >= 0:
            inner = x[row].float() @ down[adapter].float().T
            out[row] = (out[row].float() + inner @ up[adapter].float().T).to(out.dtype)


GROUP = 32
"""Columns that share a scale."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """Quantized values scale * q + minimum, by groups of columns; a row may be a single group."""

    q: NDArray[np.int64]
    """[rows, groups, columns of a group]"""
    scale: Floats
    """[rows, groups, 1]"""
    minimum: Floats
    """[rows, groups, 1]; zero except for int4."""

    def values(self) -> Floats:
        """Return the dequantized values, [rows, columns of all groups]."""
        return (self.scale * self.q.astype(np.float32) + self.minimum).reshape(len(self.q), -1)


def hadamard_rotation(count: int) -> Floats:
    """Return the rotation of 2^k * m numbers: a Hadamard matrix over runs of 2^k, a DCT-II over the m runs."""
    hadamard = np.ones((1, 1))
    while count % (2 * len(hadamard)) == 0:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    num_runs = count // len(hadamard)
    wave, run = np.arange(num_runs)[:, None], np.arange(num_runs)
    cosines = np.sqrt(np.where(wave == 0, 1, 2) / count) * np.cos(np.pi * wave * (run + 0.5) / num_runs)
    matrix: Floats = np.kron(cosines, hadamard).astype(np.float32)
    return matrix


def quantize_int8(weights: Floats) -> Quantized:
    """Quantize with one scale per row. weights: [rows, columns], zero-padded to whole groups."""
    groups = weights[:, None, :]
    return _signed(groups, _largest(groups) / np.float32(127))


def quantize_int8_groups(weights: Floats) -> Quantized:
    """Quantize with a float16 scale per group."""
    groups = _grouped(weights)
    return _signed(groups, _f16_at_least(_largest(groups) / np.float32(127)))


def quantize_int4_groups(weights: Floats) -> Quantized:
    """Quantize with a float16 scale and a float16 minimum per group, q in [0, 15]."""
    groups = _grouped(weights)
    minimum = groups.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    span = np.maximum(groups.max(-1, keepdims=True) - minimum, np.float32(0))
    scale = _f16_at_least(span / np.float32(15))
    q = np.rint(_divided(groups - minimum, scale)).clip(0, 15).astype(np.int64)
    return Quantized(q, scale, minimum)


def quantize_activations(x: Floats, group: int) -> Quantized:
    """Quantize activations with a scale per `group` columns, q in [-127, 127]. x: [rows, columns], padded."""
    groups = x.reshape(len(x), -1, group)
    largest = _largest(groups)
    with np.errstate(over="ignore"):
        steps = _divided(np.float32(127), largest)
    # A row so small that the division overflows is quantized to zeros.
    q = np.rint(groups * np.where(np.isfinite(steps), steps, 0)).astype(np.int64)
    return Quantized(q, largest / np.float32(127), np.zeros_like(largest))


def multiply_quantized(x: Floats, weights: Quantized) -> NDArray[np.float64]:
    """Return x @ weights.T, [rows, outputs]: x quantized in the groups of the weights, integer sums exact."""
    left = quantize_activations(x, weights.q.shape[-1])
    dots = np.einsum("rgc,ogc->rog", left.q, weights.q)
    sums = left.q.sum(-1)[:, None]
    by_group = dots * weights.scale[None, ..., 0].astype(np.float64) + sums * weights.minimum[None, ..., 0]
    products: NDArray[np.float64] = (by_group * left.scale[:, None, :, 0]).sum(-1)
    return products


def _signed(groups: Floats, scale: Floats) -> Quantized:
    q = np.rint(_divided(groups, scale)).astype(np.int64)
    return Quantized(q, scale, np.zeros_like(scale))


def _largest(groups: Floats) -> Floats:
    largest: Floats = np.abs(groups).max(-1, keepdims=True)
    return largest


def _grouped(weights: Floats) -> Floats:
    return weights.reshape(len(weights), -1, GROUP)


def _f16_at_least(x: Floats) -> Floats:
    """Round x up to a float16, so that the quantized values stay in their range."""
    near = x.astype(np.float16)
    return np.where(near.astype(np.float32) < x, np.nextafter(near, np.float16(np.inf)), near).astype(np.float32)


def _divided(x: Floats | np.float32, by: Floats) -> Floats:
    """Return x / by, or 0 where `by` is not positive."""
    return np.divide(x, by, out=np.zeros(np.broadcast_shapes(np.shape(x), by.shape), np.float32), where=by > 0)
