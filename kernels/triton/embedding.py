"""The first operation of a step: token ids, those sampled by the step before included, become the residual stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.dependent import dependent_launch, wait_for_kernel_ahead

_COLUMNS = 1024


@triton.jit
def _embed(
    out,
    ids,
    sampled,
    table,
    scale,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tokens, runs of columns]. ROWS: 0 if the table has all rows, else how many it has, from row FIRST on."""
    wait_for_kernel_ahead(DEPENDENT)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(ids + row)
    earlier = tl.load(sampled - 1 - token, mask=token < 0, other=0)
    # A failed row has -1 for a token; the result of its next step is discarded.
    token = tl.maximum(tl.where(token < 0, earlier, token), 0).to(tl.int64)
    is_here = i < HIDDEN
    if ROWS > 0:
        token -= FIRST
        is_here &= (token >= 0) & (token < ROWS)
    x = tl.load(table + token * HIDDEN + i, mask=is_here, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + i, x * scale, mask=i < HIDDEN)


def embed(ids: Tensor, sampled: Tensor, table: Tensor, scale: float, first: int | None = None) -> Tensor:
    """As `kernels.reference.layers.embed`; ids and sampled in int32, rows of `table` contiguous."""
    rows, hidden = table.shape
    out = torch.empty(len(ids), hidden, dtype=torch.float32, device=table.device)
    grid = (len(ids), triton.cdiv(hidden, _COLUMNS))
    sizes = {"HIDDEN": hidden, "COLUMNS": _COLUMNS, "FIRST": first or 0, "ROWS": 0 if first is None else rows}
    _embed[grid](out, ids, sampled, table, float(scale), **sizes, **dependent_launch(table.device))
    return out
