"""The operations between the matrix products, each in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.paged_cache import QUANTISED_MAX, PagedCache
from penstock.kernels.triton.decode_attention import block_offset, cache_strides
from penstock.kernels.triton.launches import padded

_ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it to a float32 below 2^22 and subtracting it again rounds to an integer, ties to even."""
_COLUMNS = 1024

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@triton.jit
def _add_norm(
    out,
    residual,
    delta,
    weight,
    bias,
    eps,
    HIDDEN: tl.constexpr,
    HIDDEN_PAD: tl.constexpr,
    ADDED: tl.constexpr,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Grid [tokens]."""
    i = tl.arange(0, HIDDEN_PAD)
    inside = i < HIDDEN
    at = tl.program_id(0).to(tl.int64) * HIDDEN + i
    x = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        x += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + at, x.to(residual.dtype.element_ty), mask=inside)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / HIDDEN, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps) * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        y += tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _normed_rope(
    x,
    at,
    is_row,
    weight,
    eps,
    cos,
    sin,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Return the heads that begin at `at`, normed and rotated by RoPE, [rows, HEAD_PAD] in float32."""
    d = tl.arange(0, HEAD_PAD)
    is_value = is_row[:, None] & (d < HEAD)[None, :]
    y = tl.load(x + at[:, None] + d[None, :], mask=is_value, other=0.0).to(tl.float32)
    norm = tl.rsqrt(tl.sum(y * y, 1) / HEAD + eps)[:, None] if NORMED else 1.0
    if NORMED:
        y *= norm * tl.load(weight + d, mask=d < HEAD, other=0.0).to(tl.float32)[None, :]
    if ROTARY > 0:
        is_first, is_rotary = d < ROTARY // 2, d < ROTARY
        other = tl.where(is_first, d + ROTARY // 2, d - ROTARY // 2)
        partner = tl.load(x + at[:, None] + other[None, :], mask=is_row[:, None] & is_rotary[None, :], other=0.0)
        partner = partner.to(tl.float32)
        if NORMED:
            partner *= norm * tl.load(weight + other, mask=is_rotary, other=0.0).to(tl.float32)[None, :]
        angle = tl.where(is_first, d, other)
        cosine = tl.load(cos + angle, mask=is_rotary, other=1.0)
        sine = tl.load(sin + angle, mask=is_rotary, other=0.0)
        y = y * cosine[None, :] + partner * tl.where(is_first, -sine, sine)[None, :]
    return y


@triton.jit
def rounded(x):
    """Round to integers, ties to even; |x| < 2^22."""
    return (x + _ROUNDING) - _ROUNDING


@triton.jit
def _keep(kept, scales, x, at, scale_at, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, MOST: tl.constexpr):
    """Store one head's vector, [1, HEAD_PAD]. MOST: the largest number of a quantized format, or 0."""
    d = tl.arange(0, HEAD_PAD)
    if MOST > 0:
        scale = tl.max(tl.abs(x), 1) / MOST
        x = x / tl.where(scale > 0, scale, 1.0)[:, None]
        if kept.dtype.element_ty == tl.int8:
            x = rounded(x)
        tl.store(scales + scale_at + tl.arange(0, 1), scale)
    tl.store(kept + at + d[None, :], x.to(kept.dtype.element_ty), mask=(d < HEAD)[None, :])


@triton.jit
def _rotate_and_store(
    out,
    qkv,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    positions,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    qkv_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    host_from,
    host_jump,
    host_scale_jump,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
    MOST: tl.constexpr,
):
    """Grid [tokens, key heads]: one key head, its value head, and the query heads that share them."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    num_heads = num_kv_heads * GROUP
    angles = tl.load(positions + token).to(tl.int64) * (ROTARY // 2)
    g, d = tl.arange(0, GROUP_PAD), tl.arange(0, HEAD_PAD)
    at = token * qkv_stride
    queries = _normed_rope(
        qkv, at + (head * GROUP + g) * HEAD, g < GROUP, q_norm, eps, cos + angles, sin + angles,
        HEAD, HEAD_PAD, ROTARY, NORMED,
    )  # fmt: skip
    to = (token * num_heads + head * GROUP + g) * HEAD
    is_value = (g < GROUP)[:, None] & (d < HEAD)[None, :]
    tl.store(out + to[:, None] + d[None, :], queries.to(out.dtype.element_ty), mask=is_value)
    slot = tl.load(slots + token)
    if slot >= 0:
        one = tl.arange(0, 1)
        key_at = at + (num_heads + head) * HEAD
        key = _normed_rope(
            qkv, key_at + one, one == 0, k_norm, eps, cos + angles, sin + angles, HEAD, HEAD_PAD, ROTARY, NORMED
        )
        value_at = key_at + num_kv_heads * HEAD
        value = tl.load(qkv + value_at + d[None, :], mask=(d < HEAD)[None, :], other=0.0).to(tl.float32)
        block, offset = slot // BLOCK, slot % BLOCK
        kept_at = block_offset(block, block_stride, host_from, host_jump) + head * head_stride + offset * HEAD
        scale_at = block_offset(block, scale_block_stride, host_from, host_scale_jump)
        scale_at += head * scale_head_stride + offset
        _keep(k_cache, k_scales, key, kept_at, scale_at, HEAD, HEAD_PAD, MOST)
        _keep(v_cache, v_scales, value, kept_at, scale_at, HEAD, HEAD_PAD, MOST)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == "silu":
        return x * tl.sigmoid(x)
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    # gelu_tanh: 0.5 * (1 + tanh(y)) is sigmoid(2 * y).
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _activate(out, x, INNER: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr):
    """Grid [tokens, runs of columns]."""
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row, width = tl.program_id(0).to(tl.int64), 2 * INNER if GATED else INNER
    y = _activated(tl.load(x + row * width + i, mask=i < INNER, other=0.0).to(tl.float32), KIND)
    if GATED:
        y *= tl.load(x + row * width + INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + i, y.to(out.dtype.element_ty), mask=i < INNER)


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """As `kernels.reference.layers.add_rms_norm`; rows of `residual` and `delta` must be contiguous."""
    return _normed(residual, delta, weight, None, eps, centred=False)


def add_layer_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """As `kernels.reference.layers.add_layer_norm`; rows of `residual` and `delta` must be contiguous."""
    return _normed(residual, delta, weight, bias, eps, centred=True)


def _normed(
    residual: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, centred: bool
) -> Tensor:
    num_tokens, hidden = residual.shape
    out = torch.empty(num_tokens, hidden, dtype=weight.dtype, device=residual.device)
    _add_norm[(num_tokens,)](
        *(out, residual, delta, weight, bias, eps),
        HIDDEN=hidden,
        HIDDEN_PAD=padded(hidden),
        ADDED=delta is not None,
        CENTRED=centred,
        BIASED=bias is not None,
        num_warps=8 if hidden > 2048 else 4,
    )
    return out


def rotate_and_store(
    qkv: Tensor,
    cache: PagedCache,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """As `kernels.reference.layers.rotate_and_store`; positions and slots in int32, cos and sin in float32.

    Either both of q_norm and k_norm are given, or neither.
    """
    num_tokens, num_kv_heads, head_dim = len(qkv), cache.k.shape[0], cache.k.shape[-1]
    group = qkv.shape[1] // head_dim // num_kv_heads - 2
    out = torch.empty(num_tokens, num_kv_heads * group, head_dim, dtype=qkv.dtype, device=qkv.device)
    _rotate_and_store[(num_tokens, num_kv_heads)](
        *(out, qkv, cache.k, cache.v, cache.k_scales, cache.v_scales),
        *(positions, slots, cos, sin, q_norm, k_norm, eps, qkv.stride(0)),
        *cache_strides(cache),
        GROUP=group,
        GROUP_PAD=padded(group),
        HEAD=head_dim,
        HEAD_PAD=padded(head_dim),
        BLOCK=cache.block_size,
        ROTARY=2 * cos.shape[-1],
        NORMED=q_norm is not None,
        MOST=0.0 if cache.k_scales is None else QUANTISED_MAX[cache.k.dtype],
        num_warps=2,
    )
    return out


def gate_mul(gate_up: Tensor, activation: str) -> Tensor:
    """As `kernels.reference.layers.gate_mul`; rows must be contiguous."""
    return _activated_rows(gate_up, gate_up.shape[1] // 2, activation, gated=True)


def activate(x: Tensor, activation: str) -> Tensor:
    """As `kernels.reference.layers.activate`; x: [num_tokens, inner]; rows must be contiguous."""
    return _activated_rows(x, x.shape[1], activation, gated=False)


def _activated_rows(x: Tensor, inner: int, activation: str, *, gated: bool) -> Tensor:
    out = torch.empty(len(x), inner, dtype=x.dtype, device=x.device)
    grid = (len(x), triton.cdiv(inner, _COLUMNS))
    _activate[grid](out, x, INNER=inner, COLUMNS=_COLUMNS, KIND=activation, GATED=gated)
    return out
