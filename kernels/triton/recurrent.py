"""Mixers with a state of fixed size: each sequence's tokens one after another, from its slot of states and to it.

Prompts and decoding run the same programs. A program has a sequence, a head and some columns of the head's matrix,
which stay in registers for all tokens of the step. It computes each token's sums over a whole block of fixed size. So
the state after a prompt is, bit for bit, the state after the same tokens in parts or one by one.

Convolutions see only the last few tokens, so their tokens are computed side by side. What they need of them is written
to the slots by a kernel behind, because a slot that is written may be the one that was read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.arguments import StateRows
from penstock.kernels.triton.launches import dependent_launch, padded, wait_for_kernel_ahead

_CHANNELS = 256
"""Channels of a convolution that a program computes."""
_COLUMNS = 8
"""Columns of a head's matrix that a program continues. With one warp, no sum waits for another warp."""
_NUMBERS_OF_WARP = 1024
"""Numbers of a state that the registers of a warp hold beside a token's own."""


@triton.jit
def _input(x, at, c, inside, gate_at, GATED: tl.constexpr):
    """Return the inputs of channels `c` of the token whose row begins at `at`; GATED: times those at `gate_at`."""
    value = tl.load(x + at + c, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        value *= tl.load(x + at + gate_at + c, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _saved(saves, i, last, end, write):
    """Return the token behind that of save `i` of a sequence, and the slot for its state.

    Behind its saves, up to `last`, comes the state after its last token, for the slot `write`.
    """
    after = tl.load(saves + 2 * i, mask=i < last, other=0)
    slot = tl.load(saves + 2 * i + 1, mask=i < last, other=0)
    return tl.where(i < last, after + 1, end), tl.where(i < last, slot, write).to(tl.int64)


@triton.jit
def _convolve(
    out,
    x,
    states,
    weight,
    bias,
    owners,
    starts,
    reads,
    stride,
    slot_stride,
    row_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tokens, blocks of channels]. GATED: a gate before the convolution, and one behind it in place of SiLU."""
    wait_for_kernel_ahead(DEPENDENT)
    token, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seq, inside = tl.load(owners + token), c < CHANNELS
    if seq >= 0:
        begin, read = tl.load(starts + seq), tl.load(reads + seq).to(tl.int64)
        row = token.to(tl.int64) * stride
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            at = token - (TAPS - 1) + tap
            is_own = at >= begin
            own = _input(x, at.to(tl.int64) * stride, c, inside & is_own, 2 * CHANNELS, GATED)
            place = read * slot_stride + (TAPS - 1 + at - begin) * row_stride
            before = tl.load(states + place + c, mask=inside & (at < begin) & (read >= 0), other=0.0)
            total += tl.load(weight + tap * CHANNELS + c, mask=inside, other=0.0) * tl.where(is_own, own, before)
        if BIASED:
            total += tl.load(bias + c, mask=inside, other=0.0)
        if GATED:
            total *= tl.load(x + row + CHANNELS + c, mask=inside, other=0.0).to(tl.float32)
        else:
            total *= tl.sigmoid(total)
        tl.store(out + token.to(tl.int64) * CHANNELS + c, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _keep_inputs(
    states,
    x,
    starts,
    reads,
    writes,
    save_starts,
    saves,
    stride,
    slot_stride,
    row_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [sequences, blocks of channels]: writes the inputs of the last TAPS - 1 tokens before each saved state."""
    wait_for_kernel_ahead(DEPENDENT)
    seq, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end, inside = tl.load(starts + seq), tl.load(starts + seq + 1), c < CHANNELS
    if begin < end:
        read, write = tl.load(reads + seq).to(tl.int64), tl.load(writes + seq)
        first, last = tl.load(save_starts + seq), tl.load(save_starts + seq + 1)
        for i in range(first, last + 1):
            # The slot that was read is written last, and then its rows move only forward.
            stop, slot = _saved(saves, i, last, end, write)
            for row in tl.static_range(TAPS - 1):
                at = stop - (TAPS - 1) + row
                is_own = at >= begin
                own = _input(x, at.to(tl.int64) * stride, c, inside & is_own, 2 * CHANNELS, GATED)
                place = read * slot_stride + (TAPS - 1 + at - begin) * row_stride
                before = tl.load(states + place + c, mask=inside & (at < begin) & (read >= 0), other=0.0)
                kept = tl.where(is_own, own, before)
                tl.store(states + slot * slot_stride + row * row_stride + c, kept, mask=inside)


def convolve(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: StateRows,
    dtype: torch.dtype = torch.float32,
    *,
    gated: bool = False,
) -> Tensor:
    """As `kernels.reference.recurrent.convolve`."""
    taps, channels = weight.shape
    out = torch.empty(len(x), channels, dtype=dtype, device=x.device)
    blocks = triton.cdiv(channels, _CHANNELS)
    sizes = {"CHANNELS": channels, "TAPS": taps, "BLOCK": _CHANNELS, "GATED": gated}
    strides = x.stride(0), states.stride(0), states.stride(1)
    options = {"num_warps": 4, **dependent_launch(x.device)}
    _convolve[(len(x), blocks)](
        *(out, x, states, weight, bias, rows.owners, rows.starts, rows.reads, *strides),
        **sizes,
        BIASED=bias is not None,
        **options,
    )
    _keep_inputs[(len(rows.reads), blocks)](
        *(states, x, rows.starts, rows.reads, rows.writes, rows.save_starts, rows.saves, *strides), **sizes, **options
    )
    return out


@triton.jit
def _softplus(x):
    """Return log(1 + e^x). The logarithm of a number near 1 is inexact on a GPU, so a small e^x has a series."""
    y = tl.exp(tl.minimum(x, 20.0))
    series = y * (1.0 - y * (0.5 - y * (0.3333333333333333 - y * 0.25)))
    return tl.where(x > 20.0, x, tl.where(y < 0.03, series, tl.log(1.0 + y)))


@triton.jit
def _unit(x, at, i, inside):
    """Load a vector and scale it to length 1."""
    vector = tl.load(x + at + i, mask=inside, other=0.0)
    return vector * tl.rsqrt(tl.sum(vector * vector, 0) + 1e-6)


@triton.jit
def _learn(
    out,
    mixed,
    gates,
    rates,
    biases,
    matrices,
    starts,
    reads,
    writes,
    save_starts,
    saves,
    slot_stride,
    row_stride,
    query_factor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILED: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [sequences, value heads, blocks of columns]: the gated delta rule.

    GROUP: value heads of a key head. TILED: they lie as far apart as there are key heads.
    """
    wait_for_kernel_ahead(DEPENDENT)
    seq, head = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, KEY_PAD), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    if begin < end:
        is_key, is_value = i < KEY, j < VALUE
        inside = is_key[:, None] & is_value[None, :]
        keys: tl.constexpr = HEADS // GROUP * KEY
        channels: tl.constexpr = 2 * keys + HEADS * VALUE
        key_head = head % (HEADS // GROUP) if TILED else head // GROUP
        places = matrices + head * KEY * row_stride + i[:, None] * row_stride + j[None, :]
        read, write = tl.load(reads + seq).to(tl.int64), tl.load(writes + seq)
        state = tl.load(places + read * slot_stride, mask=inside & (read >= 0), other=0.0)
        rate, bias = tl.load(rates + head), tl.load(biases + head)
        first, last = tl.load(save_starts + seq), tl.load(save_starts + seq + 1)
        at = begin.to(tl.int64)
        for save in range(first, last + 1):
            stop, slot = _saved(saves, save, last, end, write)
            for _ in range(begin, stop):
                row = at * channels
                query = _unit(mixed, row + key_head * KEY, i, is_key) * query_factor
                key = _unit(mixed, row + keys + key_head * KEY, i, is_key)
                value = tl.load(mixed + row + 2 * keys + head * VALUE + j, mask=is_value, other=0.0)
                gate = gates + at * (2 * HEADS) + head
                learning = tl.sigmoid(tl.load(gate))
                state *= tl.exp(rate * _softplus(tl.load(gate + HEADS) + bias))
                error = (value - tl.sum(key[:, None] * state, 0)) * learning
                state += key[:, None] * error[None, :]
                found = tl.sum(query[:, None] * state, 0)
                tl.store(out + at * (HEADS * VALUE) + head * VALUE + j, found, mask=is_value)
                at += 1
            tl.store(places + slot * slot_stride, state, mask=inside)
            begin = stop


def delta_rule(
    mixed: Tensor,
    gates: Tensor,
    rates: Tensor,
    biases: Tensor,
    matrices: Tensor,
    rows: StateRows,
    *,
    num_key_heads: int,
    tiled: bool,
) -> Tensor:
    """As `kernels.reference.recurrent.delta_rule`."""
    _, heads, key_dim, value_dim = matrices.shape
    out = torch.empty(len(mixed), heads * value_dim, dtype=torch.float32, device=mixed.device)
    key_pad = padded(key_dim)
    _learn[(len(rows.reads), heads, triton.cdiv(value_dim, _COLUMNS))](
        *(out, mixed, gates, rates, biases, matrices),
        *(rows.starts, rows.reads, rows.writes, rows.save_starts, rows.saves),
        *(matrices.stride(0), matrices.stride(2), key_dim**-0.5),
        HEADS=heads,
        GROUP=heads // num_key_heads,
        TILED=tiled,
        KEY=key_dim,
        KEY_PAD=key_pad,
        VALUE=value_dim,
        COLUMNS=_COLUMNS,
        num_warps=max(1, key_pad * _COLUMNS // _NUMBERS_OF_WARP),
        **dependent_launch(mixed.device),
    )
    return out


@triton.jit
def _scan(
    out,
    mixed,
    durations,
    biases,
    rates,
    skips,
    matrices,
    starts,
    reads,
    writes,
    save_starts,
    saves,
    slot_stride,
    row_stride,
    duration_stride,
    duration_factor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    STATE_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [sequences, heads, blocks of rows]: the state-space mixer of Mamba-2. GROUP: heads of a group."""
    wait_for_kernel_ahead(DEPENDENT)
    seq, head = tl.program_id(0), tl.program_id(1)
    i, j = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, STATE_PAD)
    begin, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    if begin < end:
        is_value, is_state = i < DIM, j < STATE
        inside = is_value[:, None] & is_state[None, :]
        size: tl.constexpr = HEADS // GROUP * STATE
        channels: tl.constexpr = HEADS * DIM + 2 * size
        places = matrices + head * DIM * row_stride + i[:, None] * row_stride + j[None, :]
        read, write = tl.load(reads + seq).to(tl.int64), tl.load(writes + seq)
        state = tl.load(places + read * slot_stride, mask=inside & (read >= 0), other=0.0)
        rate, bias, skip = tl.load(rates + head), tl.load(biases + head), tl.load(skips + head)
        first, last = tl.load(save_starts + seq), tl.load(save_starts + seq + 1)
        at = begin.to(tl.int64)
        for save in range(first, last + 1):
            stop, slot = _saved(saves, save, last, end, write)
            for _ in range(begin, stop):
                row = at * channels
                value = tl.load(mixed + row + head * DIM + i, mask=is_value, other=0.0)
                group_at = row + HEADS * DIM + head // GROUP * STATE
                written = tl.load(mixed + group_at + j, mask=is_state, other=0.0)
                wanted = tl.load(mixed + group_at + size + j, mask=is_state, other=0.0)
                given = tl.load(durations + at * duration_stride + head).to(tl.float32)
                duration = _softplus(duration_factor * given + bias)
                state = state * tl.exp(duration * rate) + (value * duration)[:, None] * written[None, :]
                found = tl.sum(state * wanted[None, :], 1) + skip * value
                tl.store(out + at * (HEADS * DIM) + head * DIM + i, found, mask=is_value)
                at += 1
            tl.store(places + slot * slot_stride, state, mask=inside)
            begin = stop


def scan(
    mixed: Tensor,
    durations: Tensor,
    biases: Tensor,
    rates: Tensor,
    skips: Tensor,
    matrices: Tensor,
    rows: StateRows,
    *,
    num_groups: int,
    duration_factor: float = 1.0,
) -> Tensor:
    """As `kernels.reference.recurrent.scan`."""
    _, heads, head_dim, state_size = matrices.shape
    out = torch.empty(len(mixed), heads * head_dim, dtype=torch.float32, device=mixed.device)
    state_pad = padded(state_size)
    _scan[(len(rows.reads), heads, triton.cdiv(head_dim, _COLUMNS))](
        *(out, mixed, durations, biases, rates, skips, matrices),
        *(rows.starts, rows.reads, rows.writes, rows.save_starts, rows.saves),
        *(matrices.stride(0), matrices.stride(2), durations.stride(0), float(duration_factor)),
        HEADS=heads,
        GROUP=heads // num_groups,
        DIM=head_dim,
        STATE=state_size,
        STATE_PAD=state_pad,
        ROWS=_COLUMNS,
        num_warps=max(1, state_pad * _COLUMNS // _NUMBERS_OF_WARP),
        **dependent_launch(mixed.device),
    )
    return out


@triton.jit
def _gate(
    out,
    x,
    gates,
    weight,
    stride,
    eps,
    gate_factor,
    factor,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    NORMED: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tokens, groups of WIDTH channels]. NORM_FIRST: all groups share the norm's weights."""
    wait_for_kernel_ahead(DEPENDENT)
    token, group, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH_PAD)
    inside, row = i < WIDTH, token * tl.num_programs(1) * WIDTH + group * WIDTH
    y = tl.load(x + row + i, mask=inside, other=0.0)
    gate = tl.load(gates + token * stride + group * WIDTH + i, mask=inside, other=0.0).to(tl.float32) * gate_factor
    if NORM_FIRST:
        y *= tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps) * tl.load(weight + i, mask=inside, other=0.0)
    y *= gate * tl.sigmoid(gate)
    if NORMED and not NORM_FIRST:
        y *= tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps) * tl.load(weight + group * WIDTH + i, mask=inside, other=0.0)
    tl.store(out + row + i, (y * factor).to(out.dtype.element_ty), mask=inside)


def gate_outputs(
    x: Tensor,
    gates: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype,
    *,
    width: int,
    eps: float,
    norm_first: bool,
    gate_factor: float = 1.0,
    factor: float = 1.0,
) -> Tensor:
    """As `kernels.reference.recurrent.gate_outputs`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _gate[(len(x), x.shape[1] // width)](
        *(out, x, gates, weight, gates.stride(0), float(eps), float(gate_factor), float(factor)),
        WIDTH=width,
        WIDTH_PAD=padded(width),
        NORMED=weight is not None,
        NORM_FIRST=norm_first,
        num_warps=8 if width > 2048 else 4 if width > 256 else 1,
        **dependent_launch(x.device),
    )
    return out
