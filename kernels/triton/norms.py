"""Norms of the residual stream, each in one pass with the addition before it; and norms of all heads of a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.arguments import QUANTIZED_MAX, Addend, NormWeights
from penstock.kernels.triton.launches import dependent_launch, padded, wait_for_kernel_ahead
from penstock.kernels.triton.products import QuantizedRows, store_quantized


@triton.jit
def _scaled_rms(x, weight, i, inside, eps, SIZE: tl.constexpr, OFFSET: tl.constexpr):
    """Return x, 0 from column SIZE on, divided by its root mean square and multiplied by the weight plus OFFSET."""
    gains = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    if OFFSET != 0:
        gains += OFFSET
    return x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * gains


@triton.jit
def _add_norm(
    out,
    scales,
    residual,
    delta,
    delta_weight,
    delta_eps,
    weight,
    bias,
    eps,
    HIDDEN: tl.constexpr,
    HIDDEN_PAD: tl.constexpr,
    ADDED: tl.constexpr,
    DELTA_NORMED: tl.constexpr,
    DELTA_OFFSET: tl.constexpr,
    DELTA_SCALE: tl.constexpr,
    NORMED: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    BIASED: tl.constexpr,
    MOST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tokens]. MOST: the largest number of the format that `out` is quantized to, or 0."""
    wait_for_kernel_ahead(DEPENDENT)
    i = tl.arange(0, HIDDEN_PAD)
    inside = i < HIDDEN
    row = tl.program_id(0).to(tl.int64)
    at = row * HIDDEN + i
    x = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        more = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        if DELTA_NORMED:
            more = _scaled_rms(more, delta_weight, i, inside, delta_eps, HIDDEN, DELTA_OFFSET)
        if DELTA_SCALE != 1:
            more *= DELTA_SCALE
        x += more
        tl.store(residual + at, x.to(residual.dtype.element_ty), mask=inside)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / HIDDEN, 0.0)
    if NORMED:
        x = _scaled_rms(x, weight, i, inside, eps, HIDDEN, OFFSET)
    if BIASED:
        x += tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    if MOST > 0:
        # Rounded as if the norm was stored first, so that both ways give the same numbers.
        store_quantized(out, scales, x.to(weight.dtype.element_ty).to(tl.float32), row, i, HIDDEN, MOST)
    else:
        tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_all_heads(
    qkv,
    q_weight,
    k_weight,
    q_eps,
    k_eps,
    stride,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    OFFSET: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tokens, 2]: norm all queries of a token as one vector, or all its keys, in place."""
    wait_for_kernel_ahead(DEPENDENT)
    i = tl.arange(0, SIZE_PAD)
    at = qkv + tl.program_id(0).to(tl.int64) * stride + i
    if tl.program_id(1) == 0:
        x = tl.load(at, mask=i < QUERIES, other=0.0).to(tl.float32)
        y = _scaled_rms(x, q_weight, i, i < QUERIES, q_eps, QUERIES, OFFSET)
        tl.store(at, y.to(qkv.dtype.element_ty), mask=i < QUERIES)
    else:
        x = tl.load(at + QUERIES, mask=i < KEYS, other=0.0).to(tl.float32)
        y = _scaled_rms(x, k_weight, i, i < KEYS, k_eps, KEYS, OFFSET)
        tl.store(at + QUERIES, y.to(qkv.dtype.element_ty), mask=i < KEYS)


def add_norm(residual: Tensor, delta: Addend | None, norm: NormWeights) -> Tensor:
    """As `kernels.reference.layers.add_norm`; rows of `residual` must be contiguous."""
    out = torch.empty(residual.shape, dtype=norm.weight.dtype, device=residual.device)
    _launch(QuantizedRows(out, out), residual, delta, norm)
    return out


def add_norm_quantized(residual: Tensor, delta: Addend | None, norm: NormWeights, dtype: torch.dtype) -> QuantizedRows:
    """Return `quantize_vectors` of `add_norm` in one pass."""
    rows = QuantizedRows.empty(residual.shape[0], residual.shape[1], dtype, residual.device)
    _launch(rows, residual, delta, norm, most=QUANTIZED_MAX[dtype])
    return rows


def norm_all_heads(qkv: Tensor, q_norm: NormWeights, k_norm: NormWeights) -> None:
    """Norm each token's queries as one vector, and its keys, in place; both are RMS norms with the same offset.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], rows contiguous: queries, keys, values.
    """
    queries, keys = len(q_norm.weight), len(k_norm.weight)
    _norm_all_heads[(len(qkv), 2)](
        *(qkv, q_norm.weight, k_norm.weight, q_norm.eps, k_norm.eps, qkv.stride(0)),
        QUERIES=queries,
        KEYS=keys,
        SIZE_PAD=padded(max(queries, keys)),
        OFFSET=q_norm.offset,
        num_warps=8 if queries > 2048 else 4,
        **dependent_launch(qkv.device),
    )


def _launch(rows: QuantizedRows, residual: Tensor, delta: Addend | None, norm: NormWeights, most: float = 0.0) -> None:
    num_tokens, hidden = residual.shape
    before = None if delta is None else delta.norm
    first = (None, 0.0) if before is None else (before.weight, before.eps)
    _add_norm[(num_tokens,)](
        *(*rows, residual, None if delta is None else delta.rows, *first, norm.weight, norm.bias, norm.eps),
        HIDDEN=hidden,
        HIDDEN_PAD=padded(hidden),
        ADDED=delta is not None,
        DELTA_NORMED=before is not None,
        DELTA_OFFSET=0.0 if before is None else before.offset,
        DELTA_SCALE=1.0 if delta is None else delta.scale,
        NORMED=norm.weight.numel() > 0,
        OFFSET=norm.offset,
        CENTRED=norm.bias is not None,
        BIASED=norm.bias is not None,
        MOST=most,
        num_warps=8 if hidden > 2048 else 4,
        **dependent_launch(residual.device),
    )
