"""Products with many LoRA adapters in one batch. Consecutive rows of the same adapter share a tile."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.triton.launches import dependent_launch, padded, wait_for_kernel_ahead

LORA_ROWS = 16
"""Most rows of a tile."""
_COLUMNS, _OUTPUTS = 128, 64
_RANKS = 64
"""Most ranks that a program multiplies at once: a tile of all 1,536 ranks of a large adapter's qkv fits nowhere."""

_EXPANDED_RANKS = 16
"""The same of the second product, which multiplies float32: tiles of 32 or 64 ranks spill on Ampere."""


@triton.jit
def _shrink(
    inner,
    x,
    down,
    tiles,
    num_columns,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tiles, runs of ranks]: multiply rows by their adapter's first matrix. A tile without rows is padding."""
    wait_for_kernel_ahead(DEPENDENT)
    tile = tl.program_id(0)
    adapter, first, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    if count == 0:
        return
    i, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    k = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    row = (first + i).to(tl.int64)
    sums = tl.zeros([ROWS, RANKS], tl.float32)
    for start in range(0, num_columns, COLUMNS):
        inside = start + c < num_columns
        given = x + row[:, None] * num_columns + start + c[None, :]
        a = tl.load(given, mask=(i < count)[:, None] & inside[None, :], other=0.0)
        weight = down + (adapter.to(tl.int64) * RANK + k)[None, :] * num_columns + start + c[:, None]
        b = tl.load(weight, mask=(k < RANK)[None, :] & inside[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    tl.store(inner + row[:, None] * RANK + k[None, :], sums, mask=(i < count)[:, None] & (k < RANK)[None, :])


@triton.jit
def _expand(
    out,
    inner,
    up,
    tiles,
    num_outputs,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tiles, runs of outputs]: add the product with the second matrix."""
    wait_for_kernel_ahead(DEPENDENT)
    tile = tl.program_id(0)
    adapter, first, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    if count == 0:
        return
    i, o = tl.arange(0, ROWS), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = (first + i).to(tl.int64)
    at = out + row[:, None] * num_outputs + o[None, :]
    is_value = (i < count)[:, None] & (o < num_outputs)[None, :]
    sums = tl.load(at, mask=is_value, other=0.0).to(tl.float32)
    for start in range(0, RANK, RANKS):
        k = start + tl.arange(0, RANKS)
        given = inner + row[:, None] * RANK + k[None, :]
        a = tl.load(given, mask=(i < count)[:, None] & (k < RANK)[None, :], other=0.0)
        weight = up + (adapter.to(tl.int64) * num_outputs + o)[None, :] * RANK + k[:, None]
        b = tl.load(weight, mask=(o < num_outputs)[None, :] & (k < RANK)[:, None], other=0.0)
        sums = tl.dot(a, b.to(tl.float32), sums, input_precision="ieee")
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_value)


def lora_tiles(adapters: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return runs of rows of one adapter, [num_tiles, 3]: adapter, first row, rows. adapters: [rows], -1 for none."""
    edges = np.flatnonzero(np.diff(adapters, prepend=-2, append=-2)).tolist()
    runs = [
        (int(adapters[start]), first, min(LORA_ROWS, end - first))
        for start, end in pairwise(edges)
        if adapters[start] >= 0
        for first in range(start, end, LORA_ROWS)
    ]
    return np.array(runs, np.int32).reshape(-1, 3)


def add_lora(out: Tensor, x: Tensor, down: Tensor, up: Tensor, tiles: Tensor) -> None:
    """As `kernels.reference.products.add_lora`, with the adapters as tiles from `lora_tiles`."""
    rank, num_columns = down.shape[1:]
    num_outputs = up.shape[1]
    if not len(tiles):
        return
    inner = torch.empty(len(x), rank, dtype=torch.float32, device=x.device)
    ranks = {"RANK": rank, "RANKS": min(_RANKS, padded(rank, 16)), "ROWS": LORA_ROWS}
    ranks |= dependent_launch(x.device)
    by_rank = len(tiles), triton.cdiv(rank, ranks["RANKS"])
    _shrink[by_rank](inner, x, down, tiles, num_columns, COLUMNS=_COLUMNS, **ranks)
    grid = (len(tiles), triton.cdiv(num_outputs, _OUTPUTS))
    ranks["RANKS"] = min(_EXPANDED_RANKS, ranks["RANKS"])
    _expand[grid](out, inner, up, tiles, num_outputs, OUTPUTS=_OUTPUTS, **ranks)
