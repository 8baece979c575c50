"""Rows of activations in int8 or float8, with one scale per row: the record, and the code that stores one row."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it to a float32 below 2^22 and subtracting it again rounds to an integer, ties to even."""


class QuantizedRows(NamedTuple):
    """Rows that are stored numbers times a scale per row."""

    q: Tensor
    """[rows, size] in int8 or float8."""
    scales: Tensor
    """[rows] float32."""

    @classmethod
    def empty(cls, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> QuantizedRows:
        """Allocate rows of `size` numbers in `dtype`."""
        q = torch.empty(rows, size, dtype=dtype, device=device)
        return cls(q, torch.empty(rows, dtype=torch.float32, device=device))


@triton.jit
def rounded(x):
    """Round to integers, ties to even; |x| < 2^22."""
    return (x + _ROUNDING) - _ROUNDING


@triton.jit
def store_quantized(q, scales, values, row, i, size, MOST: tl.constexpr):
    """Quantize a row and store it with its scale.

    values: float32, 0 from column `size` on; i: their columns; MOST: the largest number of the format.
    """
    # Plain division is not exact on GPUs, and would round differently from the reference.
    scale = tl.div_rn(tl.max(tl.abs(values), 0), MOST)
    values = tl.div_rn(values, tl.where(scale > 0, scale, 1.0))
    if q.dtype.element_ty == tl.int8:
        values = rounded(values)
    tl.store(q + row * size + i, values.to(q.dtype.element_ty), mask=i < size)
    tl.store(scales + row, scale)


def warps_for(size_pad: int) -> int:
    """Return the warps of a program that keeps a row of `size_pad` numbers in registers."""
    return min(16, max(4, size_pad // 1024))
