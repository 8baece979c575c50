"""Attention over a paged KV cache, one query token at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, query_starts: Tensor, context_lens: Tensor, block_tables: Tensor
) -> Tensor:
    """Causal attention of a mixed batch of prefill chunks and decode steps, computed in float32.

    q: [num_tokens, num_heads, head_dim]; k_cache, v_cache: [num_kv_heads, num_blocks, block_size, head_dim];
    query_starts: [num_seqs + 1]; context_lens: [num_seqs], cached tokens with this step's included;
    block_tables: [num_seqs, max_blocks]. Returns [num_tokens, num_heads, head_dim] in q's dtype.
    """
    num_kv_heads, _, block_size, head_dim = k_cache.shape
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    for seq in range(len(context_lens)):
        start, end = int(query_starts[seq]), int(query_starts[seq + 1])
        for token in range(start, end):
            visible = int(context_lens[seq]) - (end - 1 - token)
            blocks = block_tables[seq, : -(-visible // block_size)].long()
            keys = k_cache[:, blocks].float().reshape(num_kv_heads, -1, head_dim)[:, :visible]
            values = v_cache[:, blocks].float().reshape(num_kv_heads, -1, head_dim)[:, :visible]
            queries = q[token].float().view(num_kv_heads, group, head_dim)
            weights = torch.softmax(queries @ keys.transpose(1, 2) * head_dim**-0.5, dim=-1)
            out[token] = (weights @ values).reshape(-1, head_dim).to(q.dtype)
    return out


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write each token's key and value to its slot (block x block_size + offset).

    k, v: [num_tokens, num_kv_heads, head_dim]; caches: [num_kv_heads, num_blocks, block_size, head_dim];
    slots: [num_tokens].
    """
    block_size = k_cache.shape[2]
    for token, slot in enumerate(slots.tolist()):
        k_cache[:, slot // block_size, slot % block_size] = k[token]
        v_cache[:, slot // block_size, slot % block_size] = v[token]
