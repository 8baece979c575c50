"""Attention over a paged KV cache, one query token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.arguments import QUANTIZED_MAX, PagedCache


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
) -> Tensor:
    """Causal attention of a mixed batch of prefill chunks and decode steps, computed in float32.

    q: [num_tokens, num_heads, head_dim]; query_starts: [num_seqs + 1]; context_lens: [num_seqs], cached tokens
    including those of this step; block_tables: [num_seqs, max_blocks]; scale: of the scores, head_dim ** -0.5 by
    default; window: the most tokens that a query sees, its own included; biases: [num_heads, num_positions], added
    to the scores of a token by its position (ALiBi, arXiv:2108.12409); cap: of the scores, before biases: a score s
    becomes cap * tanh(s / cap). Returns q's shape and dtype.
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
            out[token] = (torch.softmax(scores, dim=-1) @ values).reshape(-1, head_dim).to(q.dtype)
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
