"""The operations between the matrix products: norms, RoPE and activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.arguments import Addend, NormWeights, PagedCache
from penstock.kernels.reference.attention import store_kv

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def embed(ids: Tensor, sampled: Tensor, table: Tensor, scale: float, first: int | None = None) -> Tensor:
    """Return the embeddings of tokens times `scale`, [num_tokens, hidden] in float32.

    ids: [num_tokens]; -1 - i stands for `sampled[i]`. An id that is negative after that is read as token 0.
    table: [vocab, hidden]; with `first` only the rows from that one on, and the embedding of another token is 0.
    """
    tokens = torch.where(ids < 0, sampled[(-1 - ids).clamp(min=0)], ids).clamp(min=0) - (first or 0)
    is_here = (tokens >= 0) & (tokens < len(table))
    return functional.embedding(tokens * is_here, table).float() * scale * is_here.unsqueeze(1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm in float32. x: [..., hidden]; weight: [hidden]; returns x's shape and dtype."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm in float32. x: [..., hidden]; weight, bias: [hidden]; returns x's shape and dtype."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (scaled if bias is None else scaled + bias.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to the pairs (i, i + rotary_dim / 2) of each head, the order of Hugging Face's checkpoints.

    x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, rotary_dim // 2]; returns x's shape and dtype.
    """
    half = cos.shape[-1]
    first, second, kept = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :].float()
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, kept), dim=-1).to(x.dtype)


def add_norm(residual: Tensor, delta: Addend | None, norm: NormWeights) -> Tensor:
    """Add `delta`, if any, to `residual` in place, and norm the sum.

    residual, rows of delta: [num_tokens, hidden]; returns [num_tokens, hidden] in the dtype of the norm's weight.
    """
    if delta is not None:
        rows = delta.rows.float() if delta.norm is None else _normed(delta.rows.float(), delta.norm)
        residual += delta.scale * rows
    return _normed(residual.float(), norm).to(norm.weight.dtype)


def norm_all_heads(qkv: Tensor, q_norm: NormWeights, k_norm: NormWeights) -> None:
    """Norm each token's queries as one vector, and its keys, in place.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values.
    """
    parts = qkv[:, : len(q_norm.weight)], qkv[:, len(q_norm.weight) :][:, : len(k_norm.weight)]
    for part, norm in zip(parts, (q_norm, k_norm), strict=True):
        part.copy_(_normed(part.float(), norm))


def _normed(x: Tensor, norm: NormWeights) -> Tensor:
    """Norm rows in float32; x: [rows, hidden] in float32."""
    if not norm.weight.numel():
        return x
    weight = norm.weight.float() + norm.offset
    return rms_norm(x, weight, norm.eps) if norm.bias is None else layer_norm(x, weight, norm.bias, norm.eps)


def bound_logits(logits: Tensor, scale: float, cap: float | None) -> None:
    """Multiply logits by `scale`, then replace each logit x by cap * tanh(x / cap), in place."""
    scaled = logits.float() * scale
    logits.copy_(scaled if cap is None else cap * torch.tanh(scaled / cap))


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
) -> Tensor:
    """Norm the heads of queries and keys, apply RoPE to them, and store keys and values in the cache.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries, keys, values; positions, slots: [num_tokens],
    slot -1 skips a token; cos, sin: [num_positions, rotary_dim // 2], of width 0 without RoPE; q_norm, k_norm:
    [head_dim], weights of RMS norms, without `offset`. Returns the queries, [num_tokens, num_heads, head_dim].
    """
    num_kv_heads, head_dim = cache.k.shape[0], cache.k.shape[-1]
    heads = qkv.view(len(qkv), -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    q = q if q_norm is None else rms_norm(q, q_norm.float() + offset, eps)
    k = k if k_norm is None else rms_norm(k, k_norm.float() + offset, eps)
    q, k = (rope(x, cos[positions.long()], sin[positions.long()]) for x in (q, k))
    store_kv(k, v, cache, slots)
    return q.contiguous()


def gate_mul(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up in float32. gate_up: [num_tokens, 2 * inter], gate first; returns [num_tokens, inter]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


def activate(x: Tensor, activation: str) -> Tensor:
    """activation(x) in float32; returns x's shape and dtype."""
    return ACTIVATIONS[activation](x.float()).to(x.dtype)
