"""RoPE: rotates queries and keys, and stores keys and values in the cache, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.decode_attention import block_offset
from penstock.kernels.triton.launches import wait_for_kernel_ahead
from penstock.kernels.triton.products import rounded


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
    OFFSET: tl.constexpr,
):
    """Return the heads that begin at `at`, normed and rotated by RoPE, [rows, HEAD_PAD] in float32."""
    d = tl.arange(0, HEAD_PAD)
    is_value = is_row[:, None] & (d < HEAD)[None, :]
    y = tl.load(x + at[:, None] + d[None, :], mask=is_value, other=0.0).to(tl.float32)
    norm = tl.rsqrt(tl.sum(y * y, 1) / HEAD + eps)[:, None] if NORMED else 1.0
    if NORMED:
        y *= norm * (tl.load(weight + d, mask=d < HEAD, other=0.0).to(tl.float32) + OFFSET)[None, :]
    if ROTARY > 0:
        is_first, is_rotary = d < ROTARY // 2, d < ROTARY
        other = tl.where(is_first, d + ROTARY // 2, d - ROTARY // 2)
        partner = tl.load(x + at[:, None] + other[None, :], mask=is_row[:, None] & is_rotary[None, :], other=0.0)
        partner = partner.to(tl.float32)
        if NORMED:
            partner *= norm * (tl.load(weight + other, mask=is_rotary, other=0.0).to(tl.float32) + OFFSET)[None, :]
        angle = tl.where(is_first, d, other)
        cosine = tl.load(cos + angle, mask=is_rotary, other=1.0)
        sine = tl.load(sin + angle, mask=is_rotary, other=0.0)
        y = y * cosine[None, :] + partner * tl.where(is_first, -sine, sine)[None, :]
    return y


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
def rotate_and_store_kernel(
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
    OFFSET: tl.constexpr,
    VALUES_NORMED: tl.constexpr,
    MOST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tokens, key heads]: one key head, its value head, and the query heads that share them."""
    wait_for_kernel_ahead(DEPENDENT)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    num_heads = num_kv_heads * GROUP
    angles = tl.load(positions + token).to(tl.int64) * (ROTARY // 2)
    g, d = tl.arange(0, GROUP_PAD), tl.arange(0, HEAD_PAD)
    at = token * qkv_stride
    queries = _normed_rope(
        qkv, at + (head * GROUP + g) * HEAD, g < GROUP, q_norm, eps, cos + angles, sin + angles,
        HEAD, HEAD_PAD, ROTARY, NORMED, OFFSET,
    )  # fmt: skip
    to = (token * num_heads + head * GROUP + g) * HEAD
    is_value = (g < GROUP)[:, None] & (d < HEAD)[None, :]
    tl.store(out + to[:, None] + d[None, :], queries.to(out.dtype.element_ty), mask=is_value)
    slot = tl.load(slots + token)
    if slot >= 0:
        one = tl.arange(0, 1)
        key_at = at + (num_heads + head) * HEAD
        key = _normed_rope(
            qkv, key_at + one, one == 0, k_norm, eps, cos + angles, sin + angles,
            HEAD, HEAD_PAD, ROTARY, NORMED, OFFSET,
        )  # fmt: skip
        value_at = key_at + num_kv_heads * HEAD
        value = tl.load(qkv + value_at + d[None, :], mask=(d < HEAD)[None, :], other=0.0).to(tl.float32)
        if VALUES_NORMED:
            value *= tl.rsqrt(tl.sum(value * value, 1) / HEAD + eps)[:, None]
        block, offset = slot // BLOCK, slot % BLOCK
        kept_at = block_offset(block, block_stride, host_from, host_jump) + head * head_stride + offset * HEAD
        scale_at = block_offset(block, scale_block_stride, host_from, host_scale_jump)
        scale_at += head * scale_head_stride + offset
        _keep(k_cache, k_scales, key, kept_at, scale_at, HEAD, HEAD_PAD, MOST)
        _keep(v_cache, v_scales, value, kept_at, scale_at, HEAD, HEAD_PAD, MOST)
