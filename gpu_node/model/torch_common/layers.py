"""The weights of a decoder in the form that the torch runners compute with, and their norms in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from penstock.contract.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm, or a layer norm if it has a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float = 0.0
    """Added to the weight of an RMS norm, in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x, [..., size of the weight], and return it in the weight's dtype."""
        wide, shape = x.float(), self.weight.shape
        if self.offset:
            gains = self.weight.float() + self.offset
            return functional.rms_norm(wide, shape, gains, self.eps).to(self.weight.dtype)
        if self.bias is None:
            return functional.rms_norm(wide, shape, eps=self.eps).to(self.weight.dtype) * self.weight
        normed = functional.layer_norm(wide, shape, self.weight.float(), self.bias.float(), self.eps)
        return normed.to(self.weight.dtype)

    def of_mean_square(self, x: Tensor, mean_square: Tensor) -> Tensor:
        """Return x as an RMS norm of a longer vector does, of which x is a part.

        x: [..., size of the weight]; mean_square: [..., 1], over the whole vector.
        """
        normed = x.float() * torch.rsqrt(mean_square + self.eps)
        if self.offset:
            return (normed * (self.weight.float() + self.offset)).to(self.weight.dtype)
        return normed.to(self.weight.dtype) * self.weight


class NoNorm(Norm):
    """Takes the place of a norm that the model does not have."""

    def __init__(self, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """dtype: of the returned rows."""
        super().__init__(torch.empty(0, dtype=dtype, device=device), None, 0.0)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x in the dtype of the weights."""
        return x.to(self.weight.dtype)


Product: TypeAlias = Callable[[Tensor], Tensor]
"""Multiplies rows [num_tokens, in] by a matrix in any format; returns [num_tokens, out]."""


def missing(rows: Tensor) -> Tensor:
    """Take the place of a product that the layer does not have, which no step calls."""
    raise InvariantError(f"a layer without this matrix multiplied {len(rows)} rows with it")


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The small tensors of a delta rule's value heads in float32, as `HeadValues` describes them."""

    gates: Tensor
    decay_rates: Tensor
    decay_biases: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class ScanWeights:
    """The small tensors of a state-space mixer's heads in float32, as `ScanValues` describes them."""

    duration_biases: Tensor
    decay_rates: Tensor
    skips: Tensor
    norm: Tensor | None


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """The small tensors of a recurrent mixer in float32, as `RecurrenceValues` describes them."""

    convolution: Tensor
    bias: Tensor | None
    heads: HeadWeights | ScanWeights | None


@dataclass(frozen=True, slots=True)
class TokenGateWeights:
    """What adds a token's own embedding for a layer."""

    gate: Product
    """[size, hidden]"""
    out: Product
    """[hidden, size]"""
    norm: Norm


@dataclass(frozen=True, slots=True)
class TokenInputWeights:
    """The embeddings of tokens for each layer, and what is added to them."""

    rows: Callable[[Tensor], Tensor]
    """Returns the embeddings [num_tokens, layers * size] of token ids [num_tokens]."""
    projection: Product
    """[layers * size, hidden]"""
    norm: Norm


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """A mixture of experts beside an MLP. `LayerWeights` has its router."""

    norm: Norm
    output_norm: Norm
    dense_norm: Norm
    experts: tuple[tuple[Product, Product], ...]
    """The products of each expert, as those of an MLP."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer."""

    attention_norm: Norm
    qkv: Product
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden]: queries, keys, values. `missing` without attention.

    With output gates, a head's query is followed by its gate. Of a recurrent mixer: its input projections."""
    head_norms: tuple[Norm, Norm] | None
    """The norms of queries and keys; None where the layer has none."""
    out: Product
    mlp_norm: Norm
    mlp_in: Product
    """[intermediate, hidden]; a gated MLP has twice as many rows: gate, then up. `missing` without an MLP.

    Of a mixture of experts: that of expert 0."""
    mlp_out: Product
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    router: Product | None = None
    """[num_experts, hidden], of a mixture of experts."""
    more_experts: tuple[tuple[Product, Product], ...] = ()
    """The products of experts 1, 2, ...: `mlp_in` and `mlp_out`."""
    recurrence: RecurrentWeights | None = None
    sinks: Tensor | None = None
    """[num_heads] in float32: a score of each head that has no value."""
    head_gate: Tensor | None = None
    """[num_heads, hidden] in float32: the gates of heads' outputs."""
    mixer_out: Product = missing
    """The output projection of a recurrent mixer beside attention."""
    choice_bias: Tensor | None = None
    """[num_experts] in float32: added to the shares by which experts are chosen."""
    shared_gate: Tensor | None = None
    """[1, hidden] in float32: the gate of the experts that every token has."""
    router_norm: Norm | None = None
    """Through which the router reads the hidden state; None: it reads what the experts read."""
    expert_factors: Tensor | None = None
    """[num_experts] in float32: of the weights of chosen experts."""
    mixture: MixtureWeights | None = None
    token_gate: TokenGateWeights | None = None
    output_scale: Tensor | None = None
    """[1] in float32: the factor of the hidden state behind the layer."""

    def expert(self, index: int) -> tuple[Product, Product]:
        """Return the products of an expert."""
        if self.mixture is not None:
            return self.mixture.experts[index]
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
    token_inputs: TokenInputWeights | None = None
    positions: Tensor | None = None
    """[max_position, hidden]: what is added to the embeddings of tokens."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self.final_norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.final_norm.weight.device
