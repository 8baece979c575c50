"""Products of few rows with a matrix, where reading the matrix takes all the time.

cuBLAS reads at most 90 % of what a GPU's memory delivers, and its programs start when the kernel ahead has ended. One
row is multiplied without tensor cores: a program adds up products of a few rows of the matrix in registers. It loads
its first weights before the kernel ahead ends (`dependent`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launches import (
    MANY_OUTPUTS,
    Tiles,
    architecture,
    dependent_launch,
    padded,
    wait_for_kernel_ahead,
)

MOST_ROWS = 64
"""More rows are the library's."""


@triton.jit
def _multiply_row(
    out, x, weight, bias, num_outputs, num_columns,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, BIASED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid [tiles of outputs]. While a tile of weights is multiplied, the next one is loaded."""
    o = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    is_output, at = o < num_outputs, weight + o[:, None] * num_columns + c[None, :]
    coming = tl.load(at, mask=is_output[:, None] & (c < num_columns)[None, :], other=0.0)
    wait_for_kernel_ahead(DEPENDENT)
    sums = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    for start in range(0, num_columns, COLUMNS):
        tile, later = coming, start + COLUMNS + c < num_columns
        coming = tl.load(at + start + COLUMNS, mask=is_output[:, None] & later[None, :], other=0.0)
        given = tl.load(x + start + c, mask=start + c < num_columns, other=0.0).to(tl.float32)
        sums += tile.to(tl.float32) * given[None, :]
    total = tl.sum(sums, 1)
    if BIASED:
        total += tl.load(bias + o, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + o, total.to(out.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_few(
    out, x, weight, bias, num_rows, num_outputs, num_columns,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr,
    BIASED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid [tiles of outputs]. TURNED: outputs are the rows of the product, of which warp groups take 64."""
    r = tl.arange(0, ROWS)
    o = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    is_row, is_output = r < num_rows, o < num_outputs
    wait_for_kernel_ahead(DEPENDENT)
    left, right = x + r.to(tl.int64) * num_columns, weight + o * num_columns
    sums = tl.zeros([OUTPUTS, ROWS] if TURNED else [ROWS, OUTPUTS], tl.float32)
    for start in range(0, num_columns, COLUMNS):
        columns = start + c
        inside = columns < num_columns
        if TURNED:
            given = tl.load(left[None, :] + columns[:, None], mask=is_row[None, :] & inside[:, None], other=0.0)
            tile = tl.load(right[:, None] + columns[None, :], mask=is_output[:, None] & inside[None, :], other=0.0)
            sums = tl.dot(tile, given, sums, input_precision="ieee")
        else:
            given = tl.load(left[:, None] + columns[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
            tile = tl.load(right[None, :] + columns[:, None], mask=is_output[None, :] & inside[:, None], other=0.0)
            sums = tl.dot(given, tile, sums, input_precision="ieee")
    if BIASED:
        added = tl.load(bias + o, mask=is_output, other=0.0).to(tl.float32)
        sums += added[:, None] if TURNED else added[None, :]
    if TURNED:
        to = out + r.to(tl.int64)[None, :] * num_outputs + o[:, None]
        tl.store(to, sums.to(out.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])
    else:
        to = out + r.to(tl.int64)[:, None] * num_outputs + o[None, :]
        tl.store(to, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def is_for_few(x: Tensor, weight: Tensor) -> bool:
    """Return whether `multiply_few` is meant for a product: measured to be faster than the library's on Hopper."""
    if x.device.type != "cuda" or len(x) > MOST_ROWS or weight.dtype.itemsize != 2 or not weight.is_contiguous():
        return False
    return 90 <= architecture(x.device) < 100


def multiply_few(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias for 1 to MOST_ROWS rows.

    x: [rows, columns]; weight: [outputs, columns]; rows of both contiguous. The result has x's dtype.
    """
    (num_rows, num_columns), num_outputs = x.shape, len(weight)
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    options = {"BIASED": bias is not None, **dependent_launch(x.device)}
    if num_rows == 1:
        outputs, columns = (2, 2048) if num_outputs >= MANY_OUTPUTS else (8, 512)
        row = out, x, weight, bias, num_outputs, num_columns
        grid = (triton.cdiv(num_outputs, outputs),)
        _multiply_row[grid](*row, OUTPUTS=outputs, COLUMNS=columns, num_warps=4, **options)
        return out
    tiles, is_turned = _few_tiles(padded(num_rows, 16), num_outputs)
    grid = (triton.cdiv(num_outputs, tiles.OUTPUTS),)
    given = out, x, weight, bias, num_rows, num_outputs, num_columns
    _multiply_few[grid](*given, TURNED=is_turned, **tiles._asdict(), **options)
    return out


def _few_tiles(rows: int, num_outputs: int) -> tuple[Tiles, bool]:
    """Return the tiles for so many padded rows, and whether they are turned; measured on an H100."""
    if num_outputs >= MANY_OUTPUTS:
        return (Tiles(rows, 64, 128, 4, 4), True) if rows <= 16 else (Tiles(rows, 128, 64, 4, 5), True)
    if rows <= 16:
        return Tiles(rows, 32, 128, 4, 5), False
    # More tiles of 32 outputs than multiprocessors would leave many idle in the last round.
    return (Tiles(rows, 32, 256, 4, 4), False) if num_outputs <= 4224 else (Tiles(rows, 64, 128, 4, 4), True)
