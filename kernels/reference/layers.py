"""The operations of a layer beside its matrix products: attention over a paged KV cache, norms, RoPE, activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.arguments import QUANTIZED_MAX, Addend, NormWeights, PagedCache


def paged_attention(
    q: Tensor,
    cache: PagedCache,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    biases: Tensor | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a mixed batch of prefill chunks and decode steps, computed in float32.

    q: [num_tokens, num_heads, head_dim]; query_starts: [num_seqs + 1]; context_lens: [num_seqs], cached tokens
    including those of this step; block_tables: [num_seqs, max_blocks]; scale: of the scores, head_dim ** -0.5 by
    default; window: the most tokens that a query sees, its own included; biases: [num_heads, num_positions], added
    to the scores of a token by its position (ALiBi, arXiv:2108.12409); cap: of the scores, before biases: a score s
    becomes cap * tanh(s / cap); sinks: [num_heads], a score of each head that takes a share of the attention and has no
    value. Returns q's shape and dtype.
    """
    num_kv_heads, head_dim = cache.k.shape[0], cache.k.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.empty_like(q)
    for seq in range(len(context_lens)):
        start, end = int(query_starts[seq]), int(query_starts[seq + 1])
        for token in range(start, end):
            visible = int(context_lens[seq]) - (end - 1 - token)
            first = max(0, visible - window) if window else 0
            blocks = block_tables[seq, : -(-visible // cache.block_size)].long()
            keys, values = (kept[:, first:visible] for kept in _read(cache, blocks))
            scores = q[token].float().view(num_kv_heads, -1, head_dim) @ keys.transpose(1, 2) * scale
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            if biases is not None:
                scores += biases[:, first:visible].reshape(num_kv_heads, -1, visible - first)
            if sinks is not None:
                scores = torch.cat((scores, sinks.float().view(num_kv_heads, -1, 1)), dim=-1)
            shares = torch.softmax(scores, dim=-1)[..., : visible - first]
            out[token] = (shares @ values).reshape(-1, head_dim).to(q.dtype)
    return out


def store_kv(k: Tensor, v: Tensor, cache: PagedCache, slots: Tensor) -> None:
    """Write each token's key and value to its slot, quantized if the cache is. Slot -1 skips the token.

    k, v: [num_tokens, num_kv_heads, head_dim]; slots: [num_tokens].
    """
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, cache.block_size)
        for given, kept, scales in ((k, cache.k, cache.k_scales), (v, cache.v, cache.v_scales)):
            if scales is None:
                kept[:, block, offset] = given[token].to(kept.dtype)
            else:
                kept[:, block, offset], scales[:, block, offset] = quantize_vectors(given[token], kept.dtype)


def quantize_vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize vectors to int8 or float8_e4m3fn with a scale each. x: [..., size]; returns that and float32 [...]."""
    max_number = QUANTIZED_MAX[dtype]
    scales = x.float().abs().amax(-1) / max_number
    scaled = x.float() / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scales


def copy_blocks(pool: Tensor, copies: Tensor) -> None:
    """Copy blocks in order: a later copy reads what earlier ones wrote. pool: [num_blocks, bytes]; copies: [n, 2]."""
    for source, target in copies.tolist():
        pool[target] = pool[source]


def _read(cache: PagedCache, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of consecutive blocks, each [num_kv_heads, tokens, head_dim] in float32."""
    keys, values = cache.k[:, blocks].float(), cache.v[:, blocks].float()
    if cache.k_scales is not None and cache.v_scales is not None:
        keys *= cache.k_scales[:, blocks].unsqueeze(-1)
        values *= cache.v_scales[:, blocks].unsqueeze(-1)
    return keys.flatten(1, 2), values.flatten(1, 2)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: functional.relu(x).square(),
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
    value_norm: bool = False,
) -> Tensor:
    """Norm the heads of queries and keys, apply RoPE to them, and store keys and values in the cache.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries, keys, values; positions, slots: [num_tokens],
    slot -1 skips a token; cos, sin: [num_positions, rotary_dim // 2], of width 0 without RoPE; q_norm, k_norm:
    [head_dim], weights of RMS norms, without `offset`; value_norm: whether values have an RMS norm without weights.
    Returns the queries, [num_tokens, num_heads, head_dim].
    """
    num_kv_heads, head_dim = cache.k.shape[0], cache.k.shape[-1]
    heads = qkv.view(len(qkv), -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    q = q if q_norm is None else rms_norm(q, q_norm.float() + offset, eps)
    k = k if k_norm is None else rms_norm(k, k_norm.float() + offset, eps)
    q, k = (rope(x, cos[positions.long()], sin[positions.long()]) for x in (q, k))
    v = rms_norm(v, torch.ones(head_dim, device=v.device), eps) if value_norm else v
    store_kv(k, v, cache, slots)
    return q.contiguous()


def gate_mul(gate_up: Tensor, activation: str, clamp: tuple[float, float] | None = None) -> Tensor:
    """activation(gate) * up in float32. gate_up: [num_tokens, 2 * inter], gate first; returns [num_tokens, inter].

    clamp: limit and slope of a clamped gate g: min(g, limit) * sigmoid(slope * min(g, limit)) * (u + 1), with u the up
    projection within -limit and limit. There the activation has no meaning.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    if clamp is None:
        return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)
    limit, slope = clamp
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(slope * gate) * (up + 1)).to(gate_up.dtype)


def activate(x: Tensor, activation: str) -> Tensor:
    """activation(x) in float32; returns x's shape and dtype."""
    return ACTIVATIONS[activation](x.float()).to(x.dtype)
