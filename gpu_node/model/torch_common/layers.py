"""A decoder's weights as torch runners multiply with them, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.gpu_node.model.torch_common.norm import Norm

Product: TypeAlias = Callable[[Tensor], Tensor]
"""Multiplies rows, [num_tokens, in], with a matrix that it keeps as it likes: [num_tokens, out]."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attention_norm: Norm
    qkv: Product
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden]: queries, keys, values."""
    head_norms: tuple[Norm, Norm] | None
    """Of queries and keys."""
    out: Product
    mlp_norm: Norm
    mlp_in: Product
    """[intermediate, hidden], twice that many rows where it is gated: gate, up."""
    mlp_out: Product


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All tensors of a decoder."""

    embedding: Callable[[Tensor], Tensor]
    """Of token ids [num_tokens]: [num_tokens, hidden]."""
    layers: Iterable[LayerWeights]
    """Gone over once a step, in order."""
    final_norm: Norm
    head: Product

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.final_norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.final_norm.weight.device
