"""Matrices in int4, with a scale and a minimum for each 32 columns of a row: how they are packed, and their products.

Of a group's 16 bytes, byte i has column i in its low half and column 16 + i in its high half.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.invariant import add_parts
from penstock.kernels.triton.launches import dependent_launch, padded, wait_for_kernel_ahead

GROUP = 32
"""Columns that share a scale in int4."""
_FEW_ROWS = 64
"""Products with more rows widen the matrix first."""
_WIDENED_BYTES = 32 << 20
"""Of a piece of a matrix that is widened to 16 bits: it stays in the L2 cache until the library reads it."""
_OFFSETS = {torch.bfloat16: 128.0, torch.float16: 1024.0}
"""The power of two whose mantissa holds a nibble in its last bits."""


def pair_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """Return the words [outputs, groups] in int32 that hold scales [outputs, groups] and minima, both in float16.

    The scale is in the lower half.
    """
    return torch.stack((scales, minima), dim=-1).contiguous().view(torch.int32)[..., 0].contiguous()


def pack_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix, [outputs, columns in whole groups]: return packed, scales and minima as the reference does."""
    groups = weight.float().view(len(weight), -1, GROUP)
    minima = groups.amin(-1).half()
    spans = (groups.amax(-1) - minima.float()).clamp(min=0)
    scales = (spans / 15).half()
    # With a scale that was rounded down, q could not reach the largest number of its group. The next larger float16 of
    # a positive one has the next bits.
    larger = (scales.view(torch.int16) + 1).view(torch.float16)
    scales = torch.where(scales.float() < spans / 15, larger, scales)
    divisors = torch.where(scales > 0, scales.float(), 1.0).unsqueeze(-1)
    q = ((groups - minima.float().unsqueeze(-1)) / divisors).round().clamp(0, 15).to(torch.uint8)
    packed = q[..., :16] | (q[..., 16:] << 4)
    return packed.flatten(1).contiguous(), scales, minima


@triton.jit
def _scales_of(pairs):
    """Return the scales and minima in float32 of words that hold both in float16."""
    scale = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _multiply_row_int4(
    out, x, words, pairs, num_outputs, num_columns,
    OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid [tiles of outputs], for one row. words: the packed bytes, four at a time.

    Each thread has whole groups, so that numbers of x are taken apart in its registers.
    """
    o = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    g, c = tl.arange(0, GROUPS), tl.arange(0, 32)
    num_groups = num_columns // 32
    is_output = o < num_outputs
    words_at = words + ((o[:, None] * num_groups + g[None, :]) * 4)[:, :, None] + tl.arange(0, 4)
    pairs_at = pairs + o[:, None] * num_groups + g[None, :]
    here = is_output[:, None] & (g < num_groups)[None, :]
    next_word, next_pair = tl.load(words_at, mask=here[:, :, None], other=0), tl.load(pairs_at, mask=here, other=0)
    wait_for_kernel_ahead(DEPENDENT)
    sums = tl.zeros([OUTPUTS, GROUPS], tl.float32)
    for start in range(0, num_groups, GROUPS):
        word, pair = next_word, next_pair
        later = is_output[:, None] & (start + GROUPS + g < num_groups)[None, :]
        next_word = tl.load(words_at + (start + GROUPS) * 4, mask=later[:, :, None], other=0)
        next_pair = tl.load(pairs_at + start + GROUPS, mask=later, other=0)
        at = x + (start + g)[:, None] * 32 + c[None, :]
        given = tl.load(at, mask=(start + g < num_groups)[:, None], other=0.0).to(tl.float32)
        # By half, word, and the bits of the byte's place in its word. `split` takes the last of these.
        even, odd = tl.split(tl.reshape(given, [GROUPS, 2, 4, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        parts = tl.zeros([OUTPUTS, GROUPS, 4], tl.float32)
        for byte in tl.static_range(4):
            both = first if byte == 0 else second if byte == 1 else third if byte == 2 else fourth
            low, high = tl.split(tl.permute(both, (0, 2, 1)))
            parts += ((word >> (8 * byte)) & 15).to(tl.float32) * low[None, :, :]
            parts += ((word >> (8 * byte + 4)) & 15).to(tl.float32) * high[None, :, :]
        scale, least = _scales_of(pair)
        sums += tl.sum(parts, 2) * scale + least * tl.sum(given, 1)[None, :]
    tl.store(out + o, tl.sum(sums, 1).to(out.dtype.element_ty), mask=is_output)


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
    sums_of_parts, x, packed, pairs, num_rows, num_outputs, num_columns, span,
    ROWS: tl.constexpr, OFFSET: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid [tiles of outputs, parts of `span` groups]. Scale the product of each group of columns, not each weight.

    x @ (scale * q + minimum) = scale * (x @ (OFFSET + q)) + (minimum - OFFSET * scale) * sum(x). The sum is a product
    with ones, so that it lies where the other product does. GROUPS: groups of columns per iteration.
    """
    wait_for_kernel_ahead(DEPENDENT)
    r, byte = tl.arange(0, ROWS), tl.arange(0, 16)
    o = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    is_row, is_output = (r < num_rows)[None, :], o < num_outputs
    num_groups = num_columns // 32
    given = x + r.to(tl.int64)[None, :] * num_columns + byte[:, None]
    weight = packed + o[:, None] * (num_groups * 16) + byte[None, :]
    ones = (tl.zeros([OUTPUTS, 16], tl.float32) + 1.0).to(x.dtype.element_ty)
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    first = tl.program_id(1) * span
    end = tl.minimum(first + span, num_groups)
    for start in range(first, end, GROUPS):
        for i in tl.static_range(GROUPS):
            group = start + i
            inside = group < end
            low = tl.load(given + group * 32, mask=is_row & inside, other=0.0)
            high = tl.load(given + group * 32 + 16, mask=is_row & inside, other=0.0)
            both = tl.load(weight + group * 16, mask=is_output[:, None] & inside, other=0)
            scale, least = _scales_of(tl.load(pairs + o * num_groups + group, mask=is_output & inside, other=0))
            part = tl.dot(_as_float(both & 15, low), low, input_precision="ieee")
            part = tl.dot(_as_float(both >> 4, low), high, part, input_precision="ieee")
            total = tl.dot(ones, low, input_precision="ieee")
            total = tl.dot(ones, high, total, input_precision="ieee")
            sums += part * scale[:, None] + total * (least - OFFSET * scale)[:, None]
    at = (tl.program_id(1) * num_rows + r.to(tl.int64)[None, :]) * num_outputs + o[:, None]
    tl.store(sums_of_parts + at, sums, mask=is_row & is_output[:, None])


@triton.jit
def _widen(
    out, packed, pairs, num_outputs, num_columns, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Grid [tiles of outputs, tiles of groups]: the weights in out's dtype."""
    wait_for_kernel_ahead(DEPENDENT)
    o = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    g, byte = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, 16)
    num_groups = num_columns // 32
    inside = (o < num_outputs)[:, None] & (g < num_groups)[None, :]
    group = o[:, None] * num_groups + g[None, :]
    both = tl.load(packed + (group * 16)[:, :, None] + byte, mask=inside[:, :, None], other=0)
    scale, least = _scales_of(tl.load(pairs + group, mask=inside, other=0))
    low = (both & 15).to(tl.float32) * scale[:, :, None] + least[:, :, None]
    high = (both >> 4).to(tl.float32) * scale[:, :, None] + least[:, :, None]
    to = out + (group * 32)[:, :, None] + byte
    tl.store(to, low.to(out.dtype.element_ty), mask=inside[:, :, None])
    tl.store(to + 16, high.to(out.dtype.element_ty), mask=inside[:, :, None])


def multiply_int4(x: Tensor, packed: Tensor, pairs: Tensor) -> Tensor:
    """As `kernels.reference.products.multiply_int4`, with scales and minima from `pair_scales`.

    Rows of all arguments must be contiguous.
    """
    num_rows, num_outputs = len(x), len(packed)
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if num_rows > _FEW_ROWS:
        _multiply_widened(out, x, packed, pairs)
    elif num_rows > 1:
        _multiply_parts(out, x, packed, pairs)
    else:
        outputs, groups = 4, 32
        given = out, x, packed.view(torch.int32), pairs, num_outputs, x.shape[1]
        grid = (triton.cdiv(num_outputs, outputs),)
        _multiply_row_int4[grid](*given, outputs, groups, num_warps=4, **dependent_launch(x.device))
    return out


def _multiply_parts(out: Tensor, x: Tensor, packed: Tensor, pairs: Tensor) -> None:
    """Sums are split into parts, so that there are many programs, and added in order."""
    (num_rows, num_columns), num_outputs = x.shape, len(packed)
    num_groups, outputs, groups = num_columns // GROUP, 64, 4
    tiles = triton.cdiv(num_outputs, outputs)
    programs = 1024 if num_rows <= 16 else 512
    span = triton.cdiv(triton.cdiv(num_groups, triton.cdiv(programs, tiles)), groups) * groups
    num_parts = triton.cdiv(num_groups, span)
    sums = torch.empty(num_parts, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    _multiply_few_int4[(tiles, num_parts)](
        *(sums, x, packed, pairs, num_rows, num_outputs, num_columns, span),
        ROWS=padded(num_rows, 8),
        OFFSET=_OFFSETS.get(x.dtype, 0.0),
        OUTPUTS=outputs,
        GROUPS=groups,
        num_warps=8 if x.dtype.itemsize == 4 and num_rows > 8 else 4,
        num_stages=4 if x.dtype.itemsize == 2 else 2,
        **dependent_launch(x.device),
    )
    add_parts(out, sums, None)


def _multiply_widened(out: Tensor, x: Tensor, packed: Tensor, pairs: Tensor) -> None:
    """Widen a piece of the matrix, let the library multiply it, and so on."""
    num_columns, (outputs, groups) = x.shape[1], (4, 32)
    size = max(128, _WIDENED_BYTES // (num_columns * x.dtype.itemsize) // 128 * 128)
    wide = torch.empty(min(size, len(packed)), num_columns, dtype=x.dtype, device=x.device)
    for first in range(0, len(packed), size):
        piece = packed[first : first + size]
        grid = triton.cdiv(len(piece), outputs), triton.cdiv(num_columns // GROUP, groups)
        given = wide, piece, pairs[first : first + size], len(piece), num_columns
        _widen[grid](*given, outputs, groups, num_warps=4, **dependent_launch(x.device))
        torch.mm(x, wide[: len(piece)].t(), out=out[:, first : first + size])
