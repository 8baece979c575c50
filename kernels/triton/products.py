"""Products with quantized matrices, one program per tile of outputs. No sum is split, so its order is fixed."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.paged_cache import QUANTIZED_MAX
from penstock.kernels.triton.dependent import dependent_launch, wait_for_kernel_ahead
from penstock.kernels.triton.launches import architecture, padded
from penstock.kernels.triton.quantizing import QuantizedRows, store_quantized, warps_for

FEW_ROWS = 16
"""Products with up to this many rows are limited by the bytes of the weights."""
MEDIUM_ROWS = 64
"""Products with up to this many rows use medium tiles, those with more rows large tiles."""


class _Tiles(NamedTuple):
    ROWS: int
    OUTPUTS: int
    COLUMNS: int
    num_warps: int
    num_stages: int


def _tiles(num_rows: int) -> _Tiles:
    """Return the tile sizes of products with more than FEW_ROWS rows: the more rows, the more reuse."""
    return _Tiles(64, 64, 128, 4, 3) if num_rows <= MEDIUM_ROWS else _Tiles(128, 128, 64, 8, 3)


_FEW_BYTES = _Tiles(16, 32, 256, 4, 5)
"""Tiles of int8 and float8 with few rows: a program per 32 outputs fills a GPU, with 32 KiB of weights on their way."""
_COLUMNS_OF_BYTES = 128
"""Columns of large tiles of int8 and float8. Hopper sums float8 products of one tile with 14 bits, then adds the sum in
float32, as often as DeepSeek-V3 does (arXiv:2412.19437, section 3.3.2)."""


class _FewTiles(NamedTuple):
    """Tiles of int4 products with few rows."""

    ROWS: int
    OFFSET: float
    OUTPUTS: int = 32
    GROUPS: int = 8
    num_warps: int = 2
    num_stages: int = 6


_OFFSETS = {torch.bfloat16: 128.0, torch.float16: 1024.0}
"""The power of two whose mantissa holds a nibble in its last bits."""


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
        # Hopper's float8 products keep 14 bits of a sum, so the hardware may sum only within one tile of columns.
        sums = tl.dot(a, b, sums, out_dtype=SUM, max_num_imprecise_acc=COLUMNS)
    row_scales = tl.load(q_scales + r, mask=r < num_rows, other=0.0)
    output_scales = tl.load(weight_scales + o, mask=o < num_outputs, other=0.0)
    result = sums.to(tl.float32) * row_scales[:, None] * output_scales[None, :]
    at = out + r.to(tl.int64)[:, None] * num_outputs + o[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(r < num_rows)[:, None] & (o < num_outputs)[None, :])


@triton.jit
def _scales_of(pairs):
    """Return the scales and minima in float32 of words that hold both in float16."""
    scale = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _spread(x, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr):
    """Repeat [GROUPS, OUTPUTS] for the 16 bytes of each group: [16 * GROUPS, OUTPUTS]."""
    return tl.reshape(tl.broadcast_to(x[:, None, :], [GROUPS, 16, OUTPUTS]), [GROUPS * 16, OUTPUTS])


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_int4(
    out,
    x,
    packed,
    pairs,
    num_rows,
    num_outputs,
    num_columns,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tiles of rows, tiles of outputs]. The halves of bytes are two products, so nothing is interleaved."""
    wait_for_kernel_ahead(DEPENDENT)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    byte, of_tile = tl.arange(0, COLUMNS // 2), tl.arange(0, COLUMNS // 32)
    is_row, is_output = (r < num_rows)[:, None], (o < num_outputs)[None, :]
    num_groups = num_columns // 32
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, num_groups, COLUMNS // 32):
        at, groups = start * 16 + byte, (start + of_tile)[:, None]
        inside = at < num_groups * 16
        given = x + r.to(tl.int64)[:, None] * num_columns + (at // 16 * 32 + at % 16)[None, :]
        low = tl.load(given, mask=is_row & inside[None, :], other=0.0)
        high = tl.load(given + 16, mask=is_row & inside[None, :], other=0.0)
        both = tl.load(packed + o[None, :] * (num_groups * 16) + at[:, None], mask=is_output & inside[:, None], other=0)
        given_pairs = tl.load(
            pairs + groups * num_outputs + o[None, :], mask=is_output & (groups < num_groups), other=0
        )
        scale, least = _scales_of(given_pairs)
        scale, least = _spread(scale, OUTPUTS, COLUMNS // 32), _spread(least, OUTPUTS, COLUMNS // 32)
        first = ((both & 15).to(tl.float32) * scale + least).to(low.dtype)
        second = ((both >> 4).to(tl.float32) * scale + least).to(low.dtype)
        sums = tl.dot(low, first, sums, input_precision="ieee")
        sums = tl.dot(high, second, sums, input_precision="ieee")
    at = out + r.to(tl.int64)[:, None] * num_outputs + o[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_row & is_output)


@triton.jit
def _as_float(nibbles, like):
    """Return OFFSET + nibbles in the dtype of `like`: or'ed into the mantissa of a power of two, where there is one."""
    if like.dtype == tl.bfloat16:
        return (nibbles.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    if like.dtype == tl.float16:
        return (nibbles.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    return nibbles.to(like.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_few_int4(
    out,
    x,
    packed,
    pairs,
    num_rows,
    num_outputs,
    num_columns,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    OFFSET: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tiles of rows, tiles of outputs]. Scale the product of each group of columns, not each weight.

    x @ (scale * q + minimum) = scale * (x @ (OFFSET + q)) + (minimum - OFFSET * scale) * sum(x). The sum is a product
    with ones, so that it lies where the other product does. GROUPS: groups of columns per iteration.
    """
    wait_for_kernel_ahead(DEPENDENT)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    byte = tl.arange(0, 16)
    is_row, is_output = (r < num_rows)[None, :], o < num_outputs
    num_groups = num_columns // 32
    given = x + r.to(tl.int64)[None, :] * num_columns + byte[:, None]
    weight = packed + o[:, None] * (num_groups * 16) + byte[None, :]
    ones = (tl.zeros([OUTPUTS, 16], tl.float32) + 1.0).to(x.dtype.element_ty)
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, num_groups, GROUPS):
        for i in tl.static_range(GROUPS):
            group = start + i
            inside = group < num_groups
            low = tl.load(given + group * 32, mask=is_row & inside, other=0.0)
            high = tl.load(given + group * 32 + 16, mask=is_row & inside, other=0.0)
            both = tl.load(weight + group * 16, mask=is_output[:, None] & inside, other=0)
            scale, least = _scales_of(tl.load(pairs + group * num_outputs + o, mask=is_output & inside, other=0))
            part = tl.dot(_as_float(both & 15, low), low, input_precision="ieee")
            part = tl.dot(_as_float(both >> 4, low), high, part, input_precision="ieee")
            total = tl.dot(ones, low, input_precision="ieee")
            total = tl.dot(ones, high, total, input_precision="ieee")
            sums += part * scale[:, None] + total * (least - OFFSET * scale)[:, None]
    at = out + r.to(tl.int64)[None, :] * num_outputs + o[:, None]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_row & is_output[:, None])


def quantize_vectors(x: Tensor, dtype: torch.dtype) -> QuantizedRows:
    """As `kernels.reference.attention.quantize_vectors` for x: [rows, size]; rows must be contiguous."""
    rows = QuantizedRows.empty(x.shape[0], x.shape[1], dtype, x.device)
    size_pad = padded(x.shape[1])
    options = {"SIZE_PAD": size_pad, "MOST": QUANTIZED_MAX[dtype], "num_warps": warps_for(size_pad)}
    _quantize[(len(x),)](*rows, x, x.shape[1], **options, **dependent_launch(x.device))
    return rows


def multiply_scaled(q: Tensor, q_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """As `kernels.reference.products.multiply_scaled`; float8 needs Ada or later."""
    (num_rows, num_columns), num_outputs = q.shape, len(weight)
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=q.device)
    tiles = _FEW_BYTES if num_rows <= FEW_ROWS else _tiles(num_rows)._replace(COLUMNS=_COLUMNS_OF_BYTES)
    _multiply_scaled[_grid(tiles, num_rows, num_outputs)](
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
    return is_supported and is_aligned and len(q) > FEW_ROWS and 90 <= architecture(q.device) < 120


def multiply_by_library(
    q: Tensor, q_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """As `multiply_scaled`, by torch's product with row-wise scales; float8 only."""
    return torch._scaled_mm(q, weight.t(), q_scales[:, None], weight_scales[None, :], out_dtype=dtype)


def multiply_int4(x: Tensor, packed: Tensor, pairs: Tensor) -> Tensor:
    """As `kernels.reference.products.multiply_int4`, with scales and minima from `pair_scales`.

    Rows of all arguments must be contiguous.
    """
    (num_rows, num_columns), num_outputs = x.shape, len(packed)
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    given = out, x, packed, pairs, num_rows, num_outputs, num_columns
    dependent = dependent_launch(x.device)
    # Larger tiles of float32 do not fit into registers.
    if num_rows <= FEW_ROWS or x.dtype == torch.float32:
        tiles = _FewTiles(8 if num_rows <= 8 else 16, _OFFSETS.get(x.dtype, 0.0))
        if x.dtype == torch.float32:
            tiles = tiles._replace(num_stages=3)  # six stages exceed Ada's shared memory
        grid = triton.cdiv(num_rows, tiles.ROWS), triton.cdiv(num_outputs, tiles.OUTPUTS)
        _multiply_few_int4[grid](*given, **tiles._asdict(), **dependent)
        return out
    large = _tiles(num_rows)
    _multiply_int4[_grid(large, num_rows, num_outputs)](*given, **large._asdict(), **dependent)
    return out


def _grid(tiles: _Tiles, num_rows: int, num_outputs: int) -> tuple[int, int]:
    return triton.cdiv(num_rows, tiles.ROWS), triton.cdiv(num_outputs, tiles.OUTPUTS)
