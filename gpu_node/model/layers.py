"""A decoder's weights as torch runners multiply with them, wherever they come from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.gpu_node.model.linear import Linear
from penstock.gpu_node.model.norm import Norm


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attention_norm: Norm
    qkv: Linear
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden]: queries, keys, values."""
    head_norms: tuple[Norm, Norm] | None
    """Of queries and keys."""
    out: Linear
    mlp_norm: Norm
    mlp_in: Linear
    """[intermediate, hidden], twice that many rows where it is gated: gate, up."""
    mlp_out: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All tensors of a decoder; `head` multiplies with `embedding` where the checkpoint ties them."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Linear
