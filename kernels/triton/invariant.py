"""Products in which a row's result depends on that row alone, to the last bit.

cuBLAS chooses tiles and the order of sums by the number of rows. Here both depend on the matrix only: one tile size,
and a sum that is split into parts of fixed length, which are added in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launches import dependent_launch, wait_for_kernel_ahead

_ROWS, _OUTPUTS = 64, 64
_SPAN = 1024
"""Columns of a part."""
_MANY_OUTPUTS = 16_384
"""A matrix with so many outputs has enough tiles for a GPU without splitting sums."""
_RUN = 512
_MAX_PARTS_BYTES = 256 << 20
"""Of the sums of parts, which are in float32. More rows than these hold are multiplied in pieces."""


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_part(
    parts,
    x,
    weight,
    num_rows,
    num_outputs,
    num_columns,
    span,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tiles of rows, tiles of outputs, parts]."""
    wait_for_kernel_ahead(DEPENDENT)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    part, c = tl.program_id(2), tl.arange(0, COLUMNS)
    is_row, is_output = (r < num_rows)[:, None], (o < num_outputs)[None, :]
    first, end = part * span, tl.minimum((part + 1) * span, num_columns)
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(first, end, COLUMNS):
        columns = start + c
        inside = columns < end
        left = x + r.to(tl.int64)[:, None] * num_columns + columns[None, :]
        a = tl.load(left, mask=is_row & inside[None, :], other=0.0)
        right = weight + o[None, :] * num_columns + columns[:, None]
        b = tl.load(right, mask=is_output & inside[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    at = (part.to(tl.int64) * num_rows + r.to(tl.int64)[:, None]) * num_outputs + o[None, :]
    tl.store(parts + at, sums, mask=is_row & is_output)


@triton.jit(do_not_specialize=["num_rows"])
def _add_parts(
    out, parts, bias, num_rows, num_outputs,
    PARTS: tl.constexpr, RUN: tl.constexpr, BIASED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid [rows, runs of outputs]."""
    wait_for_kernel_ahead(DEPENDENT)
    row, o = tl.program_id(0).to(tl.int64), tl.program_id(1) * RUN + tl.arange(0, RUN)
    inside = o < num_outputs
    total = tl.zeros([RUN], tl.float32)
    for part in range(PARTS):
        total += tl.load(parts + (part * num_rows + row) * num_outputs + o, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + o, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + o, total.to(out.dtype.element_ty), mask=inside)


def multiply_invariant(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias. x: [rows, columns]; weight: [outputs, columns]; rows of both contiguous."""
    (num_rows, num_columns), num_outputs = x.shape, len(weight)
    span = num_columns if num_outputs >= _MANY_OUTPUTS else _SPAN
    num_parts = triton.cdiv(num_columns, span)
    piece = min(max(1, num_rows), max(_ROWS, _MAX_PARTS_BYTES // (4 * num_parts * num_outputs * _ROWS) * _ROWS))
    # Pieces run one after the other, so all of them can use the same memory.
    parts = torch.empty(num_parts, piece, num_outputs, dtype=torch.float32, device=x.device)
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    for first in range(0, num_rows, piece):
        _multiply_piece(out[first : first + piece], parts, x[first : first + piece], weight, bias, span)
    return out


def _multiply_piece(out: Tensor, parts: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, span: int) -> None:
    """parts: memory for the sums of at least as many rows."""
    (num_rows, num_columns), num_outputs, num_parts = x.shape, len(weight), len(parts)
    _multiply_part[(triton.cdiv(num_rows, _ROWS), triton.cdiv(num_outputs, _OUTPUTS), num_parts)](
        *(parts, x, weight, num_rows, num_outputs, num_columns, span),
        ROWS=_ROWS,
        OUTPUTS=_OUTPUTS,
        COLUMNS=64 if x.dtype.itemsize <= 2 else 32,
        num_stages=3,
        **dependent_launch(x.device),
    )
    add_parts(out, parts, bias)


def add_parts(out: Tensor, parts: Tensor, bias: Tensor | None) -> None:
    """Write the sum of parts, in order, and of a bias to out.

    out: [rows, outputs]; parts: memory in float32 that begins with the sums of each part, [num_parts, rows, outputs];
    bias: [outputs].
    """
    num_rows, num_outputs = out.shape
    _add_parts[(num_rows, triton.cdiv(num_outputs, _RUN))](
        *(out, parts, bias, num_rows, num_outputs),
        PARTS=len(parts),
        RUN=_RUN,
        BIASED=bias is not None,
        **dependent_launch(out.device),
    )
