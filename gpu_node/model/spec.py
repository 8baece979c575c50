"""What a decoder is made of, declared: one record that every family fills and every runner reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling: long wavelengths are stretched by `factor`, short ones stay, between is blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and constants of a decoder with RMS norms, rotary positions, grouped queries and a gated MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int
    tied_head: bool


@dataclass(frozen=True, slots=True)
class NameMap:
    """Where a checkpoint keeps its tensors; `{layer}` stands for the layer's index."""

    embedding: str
    final_norm: str
    head: str
    attention_norm: str
    q: str
    k: str
    v: str
    o: str
    mlp_norm: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of checkpoint: how its config becomes a spec and how its tensors are named."""

    architecture: str
    spec_of: Callable[[Mapping[str, Any]], ModelSpec]
    names: NameMap
