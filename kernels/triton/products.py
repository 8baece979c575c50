"""Products with quantized matrices, one program per tile of outputs. No sum is split, so its order is fixed."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.paged_cache import QUANTISED_MAX
from penstock.kernels.triton.launches import padded
from penstock.kernels.triton.layers import rounded

GROUP = 32
"""Columns that share a scale in int4."""


MEDIUM_ROWS = 64
"""Products with up to this many rows use medium tiles, those with more rows large tiles."""


class _Tiles(NamedTuple):
    ROWS: int
    OUTPUTS: int
    COLUMNS: int
    num_warps: int
    num_stages: int


def _tiles(num_rows: int) -> _Tiles:
    """Return the tile sizes: few rows need many programs that read weights, many rows need reuse."""
    if num_rows <= 16:
        return _Tiles(16, 64, 128, 4, 4)
    return _Tiles(64, 64, 128, 4, 3) if num_rows <= MEDIUM_ROWS else _Tiles(128, 128, 64, 8, 3)


@triton.jit
def _quantise(q, scales, x, size, SIZE_PAD: tl.constexpr, MOST: tl.constexpr):
    """Grid [rows]."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE_PAD)
    values = tl.load(x + row * size + i, mask=i < size, other=0.0).to(tl.float32)
    # Plain division is not exact on GPUs, and would round differently from the reference.
    scale = tl.div_rn(tl.max(tl.abs(values), 0), MOST)
    values = tl.div_rn(values, tl.where(scale > 0, scale, 1.0))
    if q.dtype.element_ty == tl.int8:
        values = rounded(values)
    tl.store(q + row * size + i, values.to(q.dtype.element_ty), mask=i < size)
    tl.store(scales + row, scale)


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
):
    """Grid [tiles of rows, tiles of outputs]."""
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
        # Hopper's float8 products keep 14 bits of a sum, so the hardware may sum only within one tile of columns.
        sums = tl.dot(a, b, sums, out_dtype=SUM, max_num_imprecise_acc=COLUMNS)
    row_scales = tl.load(q_scales + r, mask=r < num_rows, other=0.0)
    output_scales = tl.load(weight_scales + o, mask=o < num_outputs, other=0.0)
    result = sums.to(tl.float32) * row_scales[:, None] * output_scales[None, :]
    at = out + r.to(tl.int64)[:, None] * num_outputs + o[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(r < num_rows)[:, None] & (o < num_outputs)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_int4(
    out,
    x,
    packed,
    scales,
    minima,
    num_rows,
    num_outputs,
    num_columns,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid [tiles of rows, tiles of outputs]. The halves of bytes are two products, so nothing is interleaved."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    byte = tl.arange(0, COLUMNS // 2)
    is_row, is_output = (r < num_rows)[:, None], (o < num_outputs)[None, :]
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, num_columns // 2, COLUMNS // 2):
        at = start + byte
        inside = at < num_columns // 2
        group = at // 16
        columns = group * 32 + at % 16
        given = x + r.to(tl.int64)[:, None] * num_columns + columns[None, :]
        low = tl.load(given, mask=is_row & inside[None, :], other=0.0)
        high = tl.load(given + 16, mask=is_row & inside[None, :], other=0.0)
        is_weight = is_output & inside[:, None]
        both = tl.load(packed + o[None, :] * (num_columns // 2) + at[:, None], mask=is_weight, other=0.0)
        group_at = o[None, :] * (num_columns // 32) + group[:, None]
        scale = tl.load(scales + group_at, mask=is_weight, other=0.0).to(tl.float32)
        least = tl.load(minima + group_at, mask=is_weight, other=0.0).to(tl.float32)
        first = ((both & 15).to(tl.float32) * scale + least).to(low.dtype)
        second = ((both >> 4).to(tl.float32) * scale + least).to(low.dtype)
        sums = tl.dot(low, first, sums, input_precision="ieee")
        sums = tl.dot(high, second, sums, input_precision="ieee")
    at = out + r.to(tl.int64)[:, None] * num_outputs + o[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_row & is_output)


def quantise_vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `kernels.reference.attention.quantise_vectors` for x: [rows, size]; rows must be contiguous."""
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    size_pad = padded(x.shape[1])
    # A thread keeps its part of the row in registers.
    num_warps = min(16, max(4, size_pad // 1024))
    _quantise[(len(x),)](q, scales, x, x.shape[1], SIZE_PAD=size_pad, MOST=QUANTISED_MAX[dtype], num_warps=num_warps)
    return q, scales


def multiply_scaled(q: Tensor, q_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """As `kernels.reference.products.multiply_scaled`; float8 needs Ada or later."""
    (num_rows, num_columns), num_outputs = q.shape, len(weight)
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=q.device)
    tiles = _tiles(num_rows)
    _multiply_scaled[_grid(tiles, num_rows, num_outputs)](
        *(out, q, q_scales, weight, weight_scales, num_rows, num_outputs, num_columns),
        SUM=tl.int32 if q.dtype == torch.int8 else tl.float32,
        **tiles._asdict(),
    )
    return out


def multiply_int4(x: Tensor, packed: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """As `kernels.reference.products.multiply_int4`; rows of all arguments must be contiguous."""
    (num_rows, num_columns), num_outputs = x.shape, len(packed)
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    tiles = _tiles(num_rows)
    if x.dtype.itemsize > 2:
        tiles = tiles._replace(num_stages=2)  # three stages exceed Ada's shared memory
    _multiply_int4[_grid(tiles, num_rows, num_outputs)](
        *(out, x, packed, scales, minima, num_rows, num_outputs, num_columns), **tiles._asdict()
    )
    return out


def _grid(tiles: _Tiles, num_rows: int, num_outputs: int) -> tuple[int, int]:
    return triton.cdiv(num_rows, tiles.ROWS), triton.cdiv(num_outputs, tiles.OUTPUTS)


def pack_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pack a matrix, [outputs, columns in whole groups], for `multiply_int4`: return packed, scales and minima."""
    groups = weight.float().view(len(weight), -1, GROUP)
    minima = groups.amin(-1).half()
    spans = (groups.amax(-1) - minima.float()).clamp(min=0)
    scales = (spans / 15).half()
    # With a scale that was rounded down, q could not reach the largest number of its group.
    scales = torch.where(scales.float() < spans / 15, _next_half(scales), scales)
    divisors = torch.where(scales > 0, scales.float(), 1.0).unsqueeze(-1)
    q = ((groups - minima.float().unsqueeze(-1)) / divisors).round().clamp(0, 15).to(torch.uint8)
    packed = q[..., :16] | (q[..., 16:] << 4)
    return packed.flatten(1).contiguous(), scales, minima


def _next_half(x: Tensor) -> Tensor:
    """Return the next larger float16. x: positive."""
    return (x.view(torch.int16) + 1).view(torch.float16)
