"""Records of the tensors of a decoder's layer, by their role."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gpu_node.model.checkpoint.stored_kinds import Stored


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A matrix made of parts that are concatenated by rows."""

    weights: tuple[Stored, ...]
    biases: tuple[Stored, ...] = ()
    """One bias per part, or none at all."""


@dataclass(frozen=True, slots=True)
class StoredNorm:
    """The weight of a norm, and the bias of a layer norm."""

    weight: Stored
    bias: Stored | None


@dataclass(frozen=True, slots=True)
class StoredHeads:
    """The small tensors of a delta rule's value heads."""

    gates: tuple[Stored, Stored]
    """[value heads, hidden] each: the gate of learning and that of the decay."""
    decay_log: Stored
    """[value heads]"""
    decay_bias: Stored
    """[value heads]"""
    norm: Stored
    """[value_dim]"""


@dataclass(frozen=True, slots=True)
class StoredScan:
    """The small tensors of a state-space mixer's heads."""

    duration_bias: Stored
    """[heads], as the next two."""
    decay_log: Stored
    skip: Stored
    norm: Stored | None
    """[outputs of the mixer]; None: outputs are not normed."""


@dataclass(frozen=True, slots=True)
class StoredRecurrence:
    """The small tensors of a recurrent mixer, which runners keep in float32."""

    convolution: Stored
    """[channels, 1, taps]"""
    bias: Stored | None
    """[channels]"""
    heads: StoredHeads | StoredScan | None
    """None for a short convolution."""
    has_rates: bool = False
    """Whether `decay_log` of the heads are the rates themselves."""
    factors: tuple[tuple[int, float], ...] = ()
    """Numbers of channels that follow one another, and the factors of what is convolved of them."""


@dataclass(frozen=True, slots=True)
class StoredRouting:
    """The small tensors of a mixture of experts, which runners keep in float32."""

    bias: Stored | None
    """[num_experts], added to the router's scores."""
    choice_bias: Stored | None
    """[num_experts]"""
    shared_gate: Stored | None
    """[1, hidden]"""
    norm: Stored | None = None
    """[hidden], of the norm through which the router reads the hidden state."""
    norm_factor: float = 1.0
    factors: Stored | None = None
    """[num_experts], of the weights of chosen experts."""


@dataclass(frozen=True, slots=True)
class StoredMixture:
    """A mixture of experts beside an MLP. `StoredLayer` has its router."""

    norm: StoredNorm
    output_norm: StoredNorm
    dense_norm: StoredNorm
    experts: tuple[tuple[StoredLinear, StoredLinear], ...]


@dataclass(frozen=True, slots=True)
class StoredTokenGate:
    """What adds a token's own embedding for a layer."""

    gate: StoredLinear
    """[size, hidden]"""
    out: StoredLinear
    """[hidden, size]"""
    norm: StoredNorm


@dataclass(frozen=True, slots=True)
class StoredTokenInputs:
    """The embeddings of tokens for each layer, which are read row by row, and what is added to them."""

    table: Stored
    """[vocab, layers * size]"""
    projection: StoredLinear
    """[layers * size, hidden]"""
    norm: Stored
    """[size]"""


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """The tensors of one decoder layer; the methods of `DecoderTensors` (tensors.py) describe each field."""

    attention_norm: StoredNorm | None
    qkv: StoredLinear | None
    head_norms: tuple[Stored, Stored | None] | None
    out: StoredLinear | None
    post_attention_norm: StoredNorm | None
    mlp_norm: StoredNorm | None
    router: Stored | None
    experts: tuple[tuple[StoredLinear, StoredLinear], ...]
    post_mlp_norm: StoredNorm | None
    recurrence: StoredRecurrence | None = None
    routing: StoredRouting | None = None
    sinks: Stored | None = None
    head_gate: Stored | None = None
    mixer_out: StoredLinear | None = None
    mixture: StoredMixture | None = None
    token_gate: StoredTokenGate | None = None
    output_scale: Stored | None = None
