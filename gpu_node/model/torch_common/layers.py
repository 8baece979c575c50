"""The weights of a decoder in the form that the torch runners compute with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.gpu_node.model.torch_common.norm import Norm

Product: TypeAlias = Callable[[Tensor], Tensor]
"""Multiplies rows [num_tokens, in] by a matrix in any format; returns [num_tokens, out]."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer."""

    attention_norm: Norm
    qkv: Product
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden]: queries, keys, values."""
    head_norms: tuple[Norm, Norm] | None
    """The norms of queries and keys; None where the model has none."""
    out: Product
    mlp_norm: Norm
    mlp_in: Product
    """[intermediate, hidden]; a gated MLP has twice as many rows: gate, then up."""
    """Of a mixture of experts: that of expert 0."""
    mlp_out: Product
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    router: Product | None = None
    """[num_experts, hidden], of a mixture of experts."""
    more_experts: tuple[tuple[Product, Product], ...] = ()
    """The products of experts 1, 2, ...: `mlp_in` and `mlp_out`."""

    def expert(self, index: int) -> tuple[Product, Product]:
        """Return the products of an expert."""
        return self.more_experts[index - 1] if index else (self.mlp_in, self.mlp_out)


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder."""

    embedding: Callable[[Tensor], Tensor]
    """Returns the embeddings [num_tokens, hidden] of token ids [num_tokens]."""
    layers: Iterable[LayerWeights]
    """The layers in order; each step iterates over them once."""
    final_norm: Norm
    head: Product

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self.final_norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.final_norm.weight.device
