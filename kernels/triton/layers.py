"""The embedding and the operations between the matrix products, each in one pass over memory."""

from __future__ import annotations

from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.arguments import QUANTIZED_MAX, PagedCache
from penstock.kernels.triton.decode_attention import cache_strides
from penstock.kernels.triton.launches import dependent_launch, padded, wait_for_kernel_ahead
from penstock.kernels.triton.products import QuantizedRows, store_quantized, warps_for
from penstock.kernels.triton.rope import rotate_and_store_kernel

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


Clamp: TypeAlias = tuple[float, float]
"""Limit and slope of clamped gates."""
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == "silu":
        return x * tl.sigmoid(x)
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == "relu2":
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    # gelu_tanh: 0.5 * (1 + tanh(y)) is sigmoid(2 * y).
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _activate(
    out,
    scales,
    x,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    SLOPE: tl.constexpr,
    MOST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tokens, runs of columns], of one run where MOST is not 0.

    MOST: the largest number of the format that `out` is quantized to, or 0. LIMIT, SLOPE: of clamped gates, or 0.
    """
    wait_for_kernel_ahead(DEPENDENT)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row, width = tl.program_id(0).to(tl.int64), 2 * INNER if GATED else INNER
    y = tl.load(x + row * width + i, mask=i < INNER, other=0.0).to(tl.float32)
    if LIMIT > 0:
        y = tl.minimum(y, LIMIT)
        y *= tl.sigmoid(SLOPE * y)
    else:
        y = _activated(y, KIND)
    if GATED:
        up = tl.load(x + row * width + INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
        if LIMIT > 0:
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        y *= up
    if MOST > 0:
        store_quantized(out, scales, y.to(x.dtype.element_ty).to(tl.float32), row, i, INNER, MOST)
    else:
        tl.store(out + row * INNER + i, y.to(out.dtype.element_ty), mask=i < INNER)


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
    offset: float = 0.0,
    value_norm: bool = False,
) -> Tensor:
    """As `kernels.reference.layers.rotate_and_store`; positions and slots in int32, cos and sin in float32.

    Either both of q_norm and k_norm are given, or neither.
    """
    num_tokens, num_kv_heads, head_dim = len(qkv), cache.k.shape[0], cache.k.shape[-1]
    group = qkv.shape[1] // head_dim // num_kv_heads - 2
    out = torch.empty(num_tokens, num_kv_heads * group, head_dim, dtype=qkv.dtype, device=qkv.device)
    rotate_and_store_kernel[(num_tokens, num_kv_heads)](
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
        OFFSET=offset,
        VALUES_NORMED=value_norm,
        MOST=0.0 if cache.k_scales is None else QUANTIZED_MAX[cache.k.dtype],
        # A head's numbers and their partners stay in registers, also where 71 queries share a key.
        num_warps=min(8, max(2, padded(group) * padded(head_dim) // 1024)),
        **dependent_launch(qkv.device),
    )
    return out


def gate_mul(gate_up: Tensor, activation: str, clamp: Clamp | None = None) -> Tensor:
    """As `kernels.reference.layers.gate_mul`; rows must be contiguous."""
    return _activated_rows(gate_up, gate_up.shape[1] // 2, activation, clamp)


def activate(x: Tensor, activation: str) -> Tensor:
    """As `kernels.reference.layers.activate`; x: [num_tokens, inner]; rows must be contiguous."""
    return _activated_rows(x, x.shape[1], activation)


def activate_quantized(
    x: Tensor, activation: str, dtype: torch.dtype, *, gated: bool, clamp: Clamp | None = None
) -> QuantizedRows:
    """Return `quantize_vectors` of `gate_mul` if gated, else of `activate`, in one pass."""
    inner = x.shape[1] // 2 if gated else x.shape[1]
    rows = QuantizedRows.empty(len(x), inner, dtype, x.device)
    columns = padded(inner)
    _activate[(len(x), 1)](
        *(*rows, x),
        INNER=inner,
        COLUMNS=columns,
        KIND=activation,
        GATED=gated,
        **_limits(clamp),
        MOST=QUANTIZED_MAX[dtype],
        num_warps=warps_for(columns),
        **dependent_launch(x.device),
    )
    return rows


def _limits(clamp: Clamp | None) -> dict[str, float]:
    limit, slope = clamp or (0.0, 0.0)
    return {"LIMIT": limit, "SLOPE": slope}


def _activated_rows(x: Tensor, inner: int, activation: str, clamp: Clamp | None = None) -> Tensor:
    out, gated = torch.empty(len(x), inner, dtype=x.dtype, device=x.device), x.shape[1] > inner
    grid = (len(x), triton.cdiv(inner, _COLUMNS))
    kinds = {"KIND": activation, "GATED": gated, "MOST": 0.0, **_limits(clamp), **dependent_launch(x.device)}
    _activate[grid](out, out, x, INNER=inner, COLUMNS=_COLUMNS, **kinds)
    return out


@triton.jit
def _bound_logits(logits, count, scale, CAP: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr):
    """Grid [runs of logits]."""
    wait_for_kernel_ahead(DEPENDENT)
    i = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(logits + i, mask=i < count, other=0.0).to(tl.float32) * scale
    if CAP > 0:
        # tanh(y) is 1 - 2 / (exp(2 * y) + 1), also where the exponential is 0 or infinite.
        x = CAP * (1.0 - 2.0 / (tl.exp(x * (2.0 / CAP)) + 1.0))
    tl.store(logits + i, x.to(logits.dtype.element_ty), mask=i < count)


def bound_logits(logits: Tensor, scale: float, cap: float | None) -> None:
    """As `kernels.reference.layers.bound_logits`; logits must be contiguous."""
    grid = (triton.cdiv(logits.numel(), _COLUMNS),)
    constants = {"CAP": cap or 0.0, "COLUMNS": _COLUMNS, **dependent_launch(logits.device)}
    _bound_logits[grid](logits, logits.numel(), scale, **constants)
