"""Orders of the rows of matrices: those that checkpoints store, as indices for the order that runners compute with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.architecture.recurrent import DeltaRule
from penstock.gpu_node.model.architecture.spec import Attention


def rows_by_part(attention: Attention) -> tuple[NDArray[np.int32], ...]:
    """Return the row indices of queries, keys and values in a fused tensor."""
    queries, keys = attention.queries, attention.keys
    rows = np.arange(queries + 2 * keys, dtype=np.int32)
    if not attention.qkv_by_head:
        q, k, v = np.split(rows, (queries, queries + keys))
        return q, k, v
    by_head = rows.reshape(attention.num_kv_heads, -1, attention.head_dim)
    return by_head[:, :-2].ravel(), by_head[:, -2].ravel(), by_head[:, -1].ravel()


def input_order(mixer: DeltaRule) -> NDArray[np.int32]:
    """Return the row indices of queries, keys, values and gates of outputs in a fused tensor."""
    return grouped_inputs(mixer.num_key_heads, mixer.key_dim, mixer.outputs // mixer.num_key_heads)


def grouped_inputs(num_key_heads: int, key_dim: int, group: int) -> NDArray[np.int32]:
    """Return the same for sizes: `group` are the channels of the values of a key head."""
    sizes = (key_dim, key_dim, group, group)
    rows = np.arange(num_key_heads * sum(sizes), dtype=np.int32).reshape(num_key_heads, -1)
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    return np.concatenate([part.ravel() for part in parts])


def value_order(mixer: DeltaRule) -> NDArray[np.int32]:
    """Return the channels of a mixer's values in the order of a GGUF file, as indices into those of Hugging Face."""
    return _tiled(mixer, mixer.value_dim)


def _tiled(mixer: DeltaRule, size: int) -> NDArray[np.int32]:
    """Return the rows of value heads of this many rows each in the order of a GGUF file: those of a key head apart."""
    by_head = np.arange(mixer.num_value_heads * size, dtype=np.int32).reshape(mixer.num_key_heads, -1, size)
    return by_head.swapaxes(0, 1).ravel()


def gate_orders(mixer: DeltaRule) -> tuple[NDArray[np.int32], ...]:
    """Return, for each part of `gate_parts`, the rows as runners have them, as indices into those of Hugging Face."""
    if len(mixer.gate_parts) == 2:
        own = _tiled(mixer, 1) if mixer.tiles_values else np.arange(mixer.num_value_heads, dtype=np.int32)
        return own, own
    fused = np.arange(2 * mixer.num_value_heads, dtype=np.int32).reshape(mixer.num_key_heads, 2, -1)
    return (fused.swapaxes(0, 1).ravel(),)


def halves_orders(attention: Attention) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the rows of queries and of keys in this order, as indices into those of an interleaved checkpoint."""
    dim = attention.head_dim if attention.rope is None else attention.rope.dim
    head = np.concatenate((np.arange(0, dim, 2), np.arange(1, dim, 2), np.arange(dim, attention.head_dim)))
    queries, keys = (
        (np.arange(count)[:, None] * attention.head_dim + head).ravel().astype(np.int32)
        for count in (attention.num_heads, attention.num_kv_heads)
    )
    return queries, keys
