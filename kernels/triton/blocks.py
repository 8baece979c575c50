"""Products in float8 with a scale for each 128 columns of a row, of activations and matrix, as DeepSeek-V3 has them.

Checkpoints have one scale for 128 outputs, too. Here each output has its own, so that matrices whose sizes are no
multiples of 128 can be joined by rows; scales are 3 % of the bytes (arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.arguments import QUANTIZED_MAX
from penstock.kernels.triton import launches
from penstock.kernels.triton.launches import MANY_OUTPUTS, Tiles, dependent_launch, padded, wait_for_kernel_ahead
from penstock.kernels.triton.products import FEW_ROWS, MEDIUM_ROWS

BLOCK_COLUMNS = 128
"""Columns that share a scale."""
_FLOAT8 = torch.float8_e4m3fn


@triton.jit
def _quantize_blocks(
    q, scales, x, size, GROUPS_PAD: tl.constexpr, COLUMNS: tl.constexpr, MOST: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Grid [rows]."""
    wait_for_kernel_ahead(DEPENDENT)
    row, g, c = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS_PAD), tl.arange(0, COLUMNS)
    at = g[:, None] * COLUMNS + c[None, :]
    values = tl.load(x + row * size + at, mask=at < size, other=0.0).to(tl.float32)
    # Plain division is not exact on GPUs, and would round differently from the reference.
    largest = tl.div_rn(tl.max(tl.abs(values), 1), MOST)
    values = tl.div_rn(values, tl.where(largest > 0, largest, 1.0)[:, None])
    tl.store(q + row * size + at, values.to(q.dtype.element_ty), mask=at < size)
    groups = tl.cdiv(size, COLUMNS)
    tl.store(scales + row * groups + g, largest, mask=g < groups)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_blocks(
    out, q, q_scales, weight, scales, bias, num_rows, num_outputs, num_columns,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, BIASED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid [tiles of rows, tiles of outputs]."""
    wait_for_kernel_ahead(DEPENDENT)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    c, groups = tl.arange(0, COLUMNS), tl.cdiv(num_columns, COLUMNS)
    is_row, is_output = r < num_rows, o < num_outputs
    left = q + r.to(tl.int64)[:, None] * num_columns + c[None, :]
    right = weight + o.to(tl.int64)[None, :] * num_columns + c[:, None]
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for group in range(groups):
        inside = group * COLUMNS + c < num_columns
        a = tl.load(left + group * COLUMNS, mask=is_row[:, None] & inside[None, :], other=0.0)
        b = tl.load(right + group * COLUMNS, mask=is_output[None, :] & inside[:, None], other=0.0)
        of_rows = tl.load(q_scales + r.to(tl.int64) * groups + group, mask=is_row, other=0.0)
        of_outputs = tl.load(scales + group * num_outputs + o, mask=is_output, other=0.0)
        sums += tl.dot(a, b, out_dtype=tl.float32) * of_rows[:, None] * of_outputs[None, :]
    if BIASED:
        sums += tl.load(bias + o, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = out + r.to(tl.int64)[:, None] * num_outputs + o[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each 128 columns of rows to float8 with a scale; x: [rows, size], rows contiguous.

    Returns [rows, size] and float32 [rows, groups].
    """
    num_rows, size = x.shape
    groups = triton.cdiv(size, BLOCK_COLUMNS)
    q = torch.empty(num_rows, size, dtype=_FLOAT8, device=x.device)
    scales = torch.empty(num_rows, groups, dtype=torch.float32, device=x.device)
    groups_pad = padded(groups)
    options = {"COLUMNS": BLOCK_COLUMNS, "MOST": QUANTIZED_MAX[_FLOAT8], "num_warps": min(16, max(4, groups_pad // 8))}
    _quantize_blocks[(num_rows,)](q, scales, x, size, GROUPS_PAD=groups_pad, **options, **dependent_launch(x.device))
    return q, scales


def multiply_blocks(
    q: Tensor, q_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return q @ weight.T + bias with the scales of both, [rows, outputs] in `dtype`; needs Ada or later.

    q, q_scales: from `quantize_blocks`; weight: [outputs, columns] in float8; scales: [groups, outputs] float32.
    """
    (num_rows, num_columns), num_outputs = q.shape, len(weight)
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=q.device)
    tiles = _tiles_of_blocks(num_rows, num_outputs, launches.architecture(q.device))
    grid = triton.cdiv(num_rows, tiles.ROWS), triton.cdiv(num_outputs, tiles.OUTPUTS)
    given = out, q, q_scales, weight, scales, bias, num_rows, num_outputs, num_columns
    _multiply_blocks[grid](*given, BIASED=bias is not None, **tiles._asdict(), **dependent_launch(q.device))
    return out


def _tiles_of_blocks(num_rows: int, num_outputs: int, capability: int) -> Tiles:
    """Return the tiles of a product; estimates, measured on no GPU. Their columns are those of a scale."""
    if num_rows <= FEW_ROWS:
        return Tiles(FEW_ROWS, 32, BLOCK_COLUMNS, 4, 5)
    if num_rows <= MEDIUM_ROWS:
        return Tiles(padded(num_rows), 64 if num_outputs >= MANY_OUTPUTS else 32, BLOCK_COLUMNS, 4, 4)
    return Tiles(128, 128 if launches.is_left_shared(capability) else 64, BLOCK_COLUMNS, 8, 3)
