"""Products in int8 and float8, one program per tile of outputs, and the rows of activations that they take.

No sum is split, so its order is fixed. The rows have one scale each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.arguments import QUANTIZED_MAX
from penstock.kernels.triton.launches import (
    MANY_OUTPUTS,
    Tiles,
    architecture,
    dependent_launch,
    padded,
    wait_for_kernel_ahead,
)

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


FEW_ROWS = 16
"""Products with up to this many rows are limited by the bytes of the weights."""
MEDIUM_ROWS = 64
"""Products with up to this many rows use medium tiles, those with more rows large tiles."""


_FEW_BYTES = Tiles(16, 32, 256, 4, 5)
"""Tiles of int8 and float8 with few rows: a program per 32 outputs fills a GPU, with 32 KiB of weights on their way."""
_COLUMNS_OF_BYTES = 128
"""Columns of large tiles of int8 and float8."""
IMPRECISE = tl.constexpr(128)
"""Hopper sums float8 products with 14 bits. After so many columns the sum is added in float32, as often as DeepSeek-V3
does it (arXiv:2412.19437, section 3.3.2)."""


def _tiles_of_bytes(num_rows: int, num_outputs: int) -> Tiles:
    """Return the tiles of int8 and float8, measured on an H100: few outputs want many programs."""
    if num_rows <= FEW_ROWS:
        return _FEW_BYTES
    if num_rows <= MEDIUM_ROWS:
        return Tiles(padded(num_rows), 64 if num_outputs >= MANY_OUTPUTS else 32, 256, 4, 3)
    if num_rows <= 2 * MEDIUM_ROWS and num_outputs < MANY_OUTPUTS:
        return Tiles(128, 32, 256, 4, 4)
    return Tiles(128, 128, _COLUMNS_OF_BYTES, 8, 3)


@triton.jit
def _quantize(q, scales, x, size, SIZE_PAD: tl.constexpr, MOST: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid [rows]."""
    wait_for_kernel_ahead(DEPENDENT)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE_PAD)
    values = tl.load(x + row * size + i, mask=i < size, other=0.0).to(tl.float32)
    store_quantized(q, scales, values, row, i, size, MOST)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_scaled(
    out,
    q,
    q_scales,
    weight,
    weight_scales,
    num_rows,
    num_outputs,
    num_columns,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tiles of rows, tiles of outputs]."""
    wait_for_kernel_ahead(DEPENDENT)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    c = tl.arange(0, COLUMNS)
    left = q + r.to(tl.int64)[:, None] * num_columns + c[None, :]
    right = weight + o.to(tl.int64)[None, :] * num_columns + c[:, None]
    sums = tl.zeros([ROWS, OUTPUTS], SUM)
    for start in range(0, num_columns, COLUMNS):
        inside = start + c < num_columns
        a = tl.load(left + start, mask=(r < num_rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(right + start, mask=(o < num_outputs)[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(a, b, sums, out_dtype=SUM, max_num_imprecise_acc=IMPRECISE)
    row_scales = tl.load(q_scales + r, mask=r < num_rows, other=0.0)
    output_scales = tl.load(weight_scales + o, mask=o < num_outputs, other=0.0)
    result = sums.to(tl.float32) * row_scales[:, None] * output_scales[None, :]
    at = out + r.to(tl.int64)[:, None] * num_outputs + o[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(r < num_rows)[:, None] & (o < num_outputs)[None, :])


def quantize_vectors(x: Tensor, dtype: torch.dtype) -> QuantizedRows:
    """As `kernels.reference.layers.quantize_vectors` for x: [rows, size]; rows must be contiguous."""
    rows = QuantizedRows.empty(x.shape[0], x.shape[1], dtype, x.device)
    size_pad = padded(x.shape[1])
    options = {"SIZE_PAD": size_pad, "MOST": QUANTIZED_MAX[dtype], "num_warps": warps_for(size_pad)}
    _quantize[(len(x),)](*rows, x, x.shape[1], **options, **dependent_launch(x.device))
    return rows


def multiply_scaled(q: Tensor, q_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """As `kernels.reference.products.multiply_scaled`; float8 needs Ada or later."""
    (num_rows, num_columns), num_outputs = q.shape, len(weight)
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=q.device)
    tiles = _tiles_of_bytes(num_rows, num_outputs)
    grid = triton.cdiv(num_rows, tiles.ROWS), triton.cdiv(num_outputs, tiles.OUTPUTS)
    _multiply_scaled[grid](
        *(out, q, q_scales, weight, weight_scales, num_rows, num_outputs, num_columns),
        SUM=tl.int32 if q.dtype == torch.int8 else tl.float32,
        **tiles._asdict(),
        **dependent_launch(q.device),
    )
    return out


def library_multiplies(q: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `multiply_by_library` supports such a product, and is meant for so many rows."""
    is_supported = q.dtype == torch.float8_e4m3fn and dtype == torch.bfloat16 and q.device.type == "cuda"
    # The library's row-wise products are for data-center GPUs from Hopper on, and read 16 bytes at a time.
    is_aligned = len(weight) % 16 == weight.shape[1] % 16 == 0
    return is_supported and is_aligned and len(q) > MEDIUM_ROWS and 90 <= architecture(q.device) < 120


def multiply_by_library(
    q: Tensor, q_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """As `multiply_scaled`, by torch's product with row-wise scales; float8 only."""
    return torch._scaled_mm(q, weight.t(), q_scales[:, None], weight_scales[None, :], out_dtype=dtype)
