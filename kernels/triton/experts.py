"""Mixtures of experts: the choice of experts, products grouped by expert, and the sum of a token's experts.

A pair is a token and one of its experts: pair token * choices + rank. Pairs are sorted by expert, so that a tile of a
product has rows of one expert, whose weights are read once for all of them. No kernel waits for the host: the number of
tiles is the most that so many pairs can have, and tiles that are too many end at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton import launches
from penstock.kernels.triton.blocks import BLOCK_COLUMNS
from penstock.kernels.triton.launches import Tiles, dependent_launch, padded, wait_for_kernel_ahead
from penstock.kernels.triton.products import IMPRECISE

ExpertFormat: TypeAlias = Literal["plain", "rows", "blocks", "int4", "mxfp4"]
"""Floats; bytes with a scale for each row, or for each 128 columns of it; 4 bits with a scale for each 32 columns."""
_CHUNK = 1024
"""Pairs that a program of the sort looks at together."""
_COLUMNS = 1024
_LEAST = tl.constexpr(-1e30)
"""Stands for scores that are no numbers, as those of padding tokens may be. Its negative bounds the others."""
_SHARES_EPS = tl.constexpr(1e-6)
"""Added to the sum by which sigmoid shares are divided."""


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One matrix of each expert of a layer."""

    format: ExpertFormat
    weight: Tensor
    """[experts, outputs, columns]; for 4 bits [experts, outputs, columns / 2] in uint8."""
    scales: Tensor | None = None
    """rows: [experts, outputs] float32. blocks: [experts, columns / 128, outputs] float32. int4: [experts, outputs,
    columns / 32], words from `pair_scales`. mxfp4: as for int4, exponents plus 127 in uint8."""
    bias: Tensor | None = None
    """[experts, outputs]"""


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """How experts are chosen, as `kernels.reference.experts.choose_experts` does it."""

    per_token: int
    num_shared: int = 0
    """Experts that every token has, behind the others."""
    by_sigmoid: bool = False
    normalized: bool = False
    scale: float = 1.0
    bias: Tensor | None = None
    """[experts] float32"""
    factors: Tensor | None = None
    """[experts] float32"""

    @property
    def count(self) -> int:
        """The experts of a token."""
        return self.per_token + self.num_shared


class Routes(NamedTuple):
    """Which tokens go to which experts."""

    chosen: Tensor
    """[tokens, choices] int32: experts; -1 for padding tokens."""
    shares: Tensor
    """[tokens, choices] float32: the weights of their outputs."""
    order: Tensor
    """[pairs] int32: the pairs sorted by expert; pairs of padding tokens are left out, and the rest is not written."""
    starts: Tensor
    """[experts + 1] int32: where the pairs of each expert begin in `order`, then where the last ones end."""


@triton.jit
def _choose(
    chosen, shares, scores, slots, bias, factors, gates, scale,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, PER_TOKEN: tl.constexpr, CHOICES: tl.constexpr,
    CHOICES_PAD: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr, BIASED: tl.constexpr,
    FACTORS: tl.constexpr, GATED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid [tokens]."""
    wait_for_kernel_ahead(DEPENDENT)
    token, e, c = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS_PAD), tl.arange(0, CHOICES_PAD)
    given = tl.load(scores + token * EXPERTS + e, mask=e < EXPERTS, other=0.0).to(tl.float32)
    # A comparison with what is no number is false.
    given = tl.minimum(tl.where((e < EXPERTS) & (given > _LEAST), given, _LEAST), -_LEAST)
    if SIGMOID:
        weights = tl.sigmoid(given)
    else:
        weights = tl.exp(given - tl.max(given, 0))
        weights = tl.where(e < EXPERTS, weights, 0.0)
        weights = weights / tl.sum(weights, 0)
    preferred = weights
    if BIASED:
        preferred += tl.load(bias + e, mask=e < EXPERTS, other=0.0)
    is_free = e < EXPERTS
    experts = EXPERTS + c - PER_TOKEN
    of_choices = tl.zeros([CHOICES_PAD], tl.float32)
    for rank in tl.static_range(PER_TOKEN):
        best = tl.max(tl.where(is_free, preferred, -float("inf")), 0)
        expert = tl.min(tl.where(is_free & (preferred == best), e, EXPERTS_PAD), 0)
        is_free = is_free & (e != expert)
        experts = tl.where(c == rank, expert, experts)
        of_choices = tl.where(c == rank, tl.sum(tl.where(e == expert, weights, 0.0), 0), of_choices)
    if NORMALIZED:
        of_choices = of_choices / (tl.sum(of_choices, 0) + (_SHARES_EPS if SIGMOID else 0.0))
    of_choices *= scale
    if FACTORS:
        of_choices *= tl.load(factors + experts, mask=c < PER_TOKEN, other=0.0)
    if CHOICES > PER_TOKEN:
        gate = 1.0
        if GATED:
            gate = tl.sigmoid(tl.load(gates + token).to(tl.float32))
        of_choices = tl.where(c >= PER_TOKEN, gate, of_choices)
    is_padding = tl.load(slots + token) < 0
    tl.store(chosen + token * CHOICES + c, tl.where(is_padding, -1, experts), mask=c < CHOICES)
    tl.store(shares + token * CHOICES + c, of_choices, mask=c < CHOICES)


@triton.jit(do_not_specialize=["num_pairs"])
def _sort(order, starts, chosen, num_pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid [experts]: each finds its own pairs. Their order within an expert is always the same."""
    wait_for_kernel_ahead(DEPENDENT)
    expert, i = tl.program_id(0), tl.arange(0, CHUNK)
    before, own = 0, 0
    for at in range(0, num_pairs, CHUNK):
        experts = tl.load(chosen + at + i, mask=at + i < num_pairs, other=-1)
        before += tl.sum(((experts >= 0) & (experts < expert)).to(tl.int32), 0)
        own += tl.sum((experts == expert).to(tl.int32), 0)
    tl.store(starts + expert, before)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, before + own)
    if own > 0:
        for at in range(0, num_pairs, CHUNK):
            experts = tl.load(chosen + at + i, mask=at + i < num_pairs, other=-1)
            is_own = (experts == expert).to(tl.int32)
            tl.store(order + before + tl.cumsum(is_own, 0) - 1, at + i, mask=is_own > 0)
            before += tl.sum(is_own, 0)


@triton.jit
def _place_of(tile, starts, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert of a tile, the tile's first place in the order, and where the expert's places end.

    The expert is at least EXPERTS for a tile too many.
    """
    e = tl.arange(0, EXPERTS_PAD)
    first = tl.load(starts + e, mask=e < EXPERTS, other=0)
    last = tl.load(starts + e + 1, mask=e < EXPERTS, other=0)
    tiles = tl.cdiv(last - first, ROWS)
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    begin = tl.sum(tl.where(e == expert, first + (tile - ends + tiles) * ROWS, 0), 0)
    return expert, begin, tl.sum(tl.where(e == expert, last, 0), 0)


@triton.jit
def _values_of(nibbles, scales, exponent, FORMAT: tl.constexpr):
    """Return the weights of 4-bit numbers in float32. scales: words of int4, or exponents plus 127."""
    if FORMAT == "int4":
        scale = (scales & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        least = (scales >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return nibbles.to(tl.float32) * scale + least
    # A sign, two bits of exponent and one of fraction. Without an exponent the number is 0 or a half.
    size = nibbles & 7
    fraction = (size & 1).to(tl.float32)
    power = tl.where(size >= 6, 4.0, tl.where(size >= 4, 2.0, 1.0))
    value = tl.where(size < 2, 0.5 * fraction, (1.0 + 0.5 * fraction) * power)
    return tl.where(nibbles >= 8, -value, value) * exponent


@triton.jit
def _multiply_experts(
    out, x, x_scales, weight, scales, bias, order, starts, num_outputs, num_columns,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, CHOICES: tl.constexpr, GATHERS: tl.constexpr,
    FORMAT: tl.constexpr, BIASED: tl.constexpr, SUM: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid [tiles of rows, tiles of outputs]. GATHERS: rows of x are tokens, not places, and rows of out are places."""
    wait_for_kernel_ahead(DEPENDENT)
    expert, begin, end = _place_of(tl.program_id(0), starts, EXPERTS, EXPERTS_PAD, ROWS)
    if expert >= EXPERTS:
        return
    place, c = begin + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = place < end, o < num_outputs
    pair = tl.load(order + place, mask=is_row, other=0)
    row = (pair // CHOICES if GATHERS else place).to(tl.int64)
    left = x + row[:, None] * num_columns
    output = expert.to(tl.int64) * num_outputs + o
    sums = tl.zeros([ROWS, OUTPUTS], SUM)
    for start in range(0, num_columns, COLUMNS):
        if FORMAT == "int4" or FORMAT == "mxfp4":
            # Of a group of 32 columns, byte i has columns i and 16 + i.
            i = tl.arange(0, COLUMNS // 2)
            group, inside = start // 32 + i // 16, start + i // 16 * 32 < num_columns
            low = left + (group * 32 + i % 16)[None, :]
            both = tl.load(
                weight + output[None, :] * (num_columns // 2) + (group * 16 + i % 16)[:, None],
                mask=is_output[None, :] & inside[:, None], other=0,
            )  # fmt: skip
            scale_at = scales + output[None, :] * (num_columns // 32) + group[:, None]
            scale = tl.load(scale_at, mask=is_output[None, :] & inside[:, None], other=0)
            exponent = tl.exp2(scale.to(tl.float32) - 127.0) if FORMAT == "mxfp4" else 1.0
            for half in tl.static_range(2):
                given = tl.load(low + 16 * half, mask=is_row[:, None] & inside[None, :], other=0.0)
                tile = _values_of((both >> (4 * half)) & 15, scale, exponent, FORMAT).to(given.dtype)
                sums = tl.dot(given, tile, sums, input_precision="ieee")
        else:
            inside = start + c < num_columns
            given = tl.load(left + (start + c)[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
            right = weight + output[None, :] * num_columns + (start + c)[:, None]
            tile = tl.load(right, mask=is_output[None, :] & inside[:, None], other=0.0)
            if FORMAT == "blocks":
                part = tl.dot(given, tile, out_dtype=tl.float32)
                groups = tl.cdiv(num_columns, COLUMNS)
                of_row = tl.load(x_scales + row * groups + start // COLUMNS, mask=is_row, other=0.0)
                at = (expert.to(tl.int64) * groups + start // COLUMNS) * num_outputs + o
                sums += part * of_row[:, None] * tl.load(scales + at, mask=is_output, other=0.0)[None, :]
            elif FORMAT == "rows":
                sums = tl.dot(given, tile, sums, out_dtype=SUM, max_num_imprecise_acc=IMPRECISE)
            else:
                sums = tl.dot(given, tile, sums, input_precision="ieee")
    result = sums.to(tl.float32)
    if FORMAT == "rows":
        of_row = tl.load(x_scales + row, mask=is_row, other=0.0)
        result *= of_row[:, None] * tl.load(scales + output, mask=is_output, other=0.0)[None, :]
    if BIASED:
        result += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = (place if GATHERS else pair).to(tl.int64)[:, None] * num_outputs + o[None, :]
    tl.store(out + to, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _sum_experts(
    out, of_pairs, chosen, shares, size, CHOICES: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Grid [tokens, runs of columns]. Padding tokens have zeros."""
    wait_for_kernel_ahead(DEPENDENT)
    token, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in range(CHOICES):
        pair = token * CHOICES + choice
        is_used = tl.load(chosen + pair) >= 0
        rows = tl.load(of_pairs + pair * size + i, mask=is_used & (i < size), other=0.0)
        total += rows.to(tl.float32) * tl.load(shares + pair)
    tl.store(out + token * size + i, total, mask=i < size)


def choose_experts(scores: Tensor, choice: ExpertChoice, slots: Tensor, gates: Tensor | None = None) -> Routes:
    """Choose the experts of tokens and sort the pairs by expert.

    scores: [tokens, experts], not those that every token has; slots: [tokens] int32, negative for padding tokens;
    gates: [tokens], before their sigmoid, of the experts that every token has.
    """
    num_tokens, num_experts = scores.shape
    device, total = scores.device, num_experts + choice.num_shared
    chosen = torch.empty(num_tokens, choice.count, dtype=torch.int32, device=device)
    shares = torch.empty(num_tokens, choice.count, dtype=torch.float32, device=device)
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=device)
    starts = torch.empty(total + 1, dtype=torch.int32, device=device)
    _choose[(num_tokens,)](
        *(chosen, shares, scores, slots, choice.bias, choice.factors, gates),
        choice.scale if choice.by_sigmoid else 1.0,
        EXPERTS=num_experts,
        EXPERTS_PAD=padded(num_experts),
        PER_TOKEN=choice.per_token,
        CHOICES=choice.count,
        CHOICES_PAD=padded(choice.count),
        SIGMOID=choice.by_sigmoid,
        NORMALIZED=choice.normalized,
        BIASED=choice.bias is not None,
        FACTORS=choice.factors is not None,
        GATED=gates is not None,
        num_warps=1,
        **dependent_launch(device),
    )
    _sort[(total,)](order, starts, chosen, chosen.numel(), EXPERTS=total, CHUNK=_CHUNK, **dependent_launch(device))
    return Routes(chosen, shares, order, starts)


def multiply_experts(
    x: Tensor,
    matrices: ExpertMatrices,
    routes: Routes,
    dtype: torch.dtype,
    *,
    gathers: bool,
    x_scales: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Multiply the row of each pair by the matrix of its expert; rows must be contiguous.

    gathers: x has a row for each token, and the result one for each place of `order`. Else x has a row for each place,
    and the result one for each pair. x_scales: of rows in the format `rows`, [rows], or `blocks`, [rows, groups].
    deterministic: a row's result does not depend on how many other rows there are. Returns [pairs, outputs] in `dtype`.
    """
    num_pairs, (num_experts, num_outputs) = len(routes.order), matrices.weight.shape[:2]
    out = torch.empty(num_pairs, num_outputs, dtype=dtype, device=x.device)
    average = num_pairs / num_experts
    rows = 64 if deterministic else 16 if average <= 16 else 64 if average <= 96 else 128
    tiles = _tiles_of(matrices.format, rows, x.dtype, launches.architecture(x.device))
    num_tiles = num_pairs // tiles.ROWS + min(num_experts, num_pairs)
    _multiply_experts[(num_tiles, triton.cdiv(num_outputs, tiles.OUTPUTS))](
        *(out, x, x_scales, matrices.weight, matrices.scales, matrices.bias, routes.order, routes.starts),
        *(num_outputs, x.shape[1]),
        EXPERTS=num_experts,
        EXPERTS_PAD=padded(num_experts),
        CHOICES=routes.chosen.shape[1],
        GATHERS=gathers,
        FORMAT=matrices.format,
        BIASED=matrices.bias is not None,
        SUM=tl.int32 if x.dtype == torch.int8 else tl.float32,
        **tiles._asdict(),
        **dependent_launch(x.device),
    )
    return out


def _tiles_of(kind: ExpertFormat, rows: int, dtype: torch.dtype, capability: int) -> Tiles:
    """Return the tiles of a product by their rows; estimates, measured on no GPU.

    test_compile.py checks that registers and shared memory are enough.
    """
    is_narrow = kind in ("int4", "mxfp4")
    columns = BLOCK_COLUMNS if dtype.itemsize == 1 or is_narrow else 128 // dtype.itemsize
    if rows == 16:
        return Tiles(rows, 64, columns, 4, 4)
    if launches.is_left_shared(capability):
        # Four warps have no registers for 128 outputs in float32, nor for as many that are widened.
        outputs = 64 if dtype.itemsize > 2 or (is_narrow and rows == 64) else 128
        return Tiles(rows, outputs, columns, rows // 16, 3)
    if is_narrow:
        # Widened weights are in registers, too, so 64 rows in four warps have room for 32 columns alone.
        return Tiles(rows, 64, rows // 2, rows // 16, 3)
    outputs = 64 if dtype.itemsize > 2 or kind == "blocks" else 128
    return Tiles(rows, outputs, columns, 8 if dtype.itemsize > 2 else rows // 16, 3)


def sum_experts(of_pairs: Tensor, routes: Routes) -> Tensor:
    """Return the weighted sum of the rows of each token's experts, [tokens, size] in float32.

    of_pairs: [pairs, size]; rows of padding tokens are not read.
    """
    (num_tokens, choices), size = routes.chosen.shape, of_pairs.shape[1]
    out = torch.empty(num_tokens, size, dtype=torch.float32, device=of_pairs.device)
    grid = (num_tokens, triton.cdiv(size, _COLUMNS))
    constants = {"CHOICES": choices, "COLUMNS": _COLUMNS, **dependent_launch(of_pairs.device)}
    _sum_experts[grid](out, of_pairs, routes.chosen, routes.shares, size, **constants)
    return out
