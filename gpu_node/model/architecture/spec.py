"""What a decoder is made of, declared: one record that every family fills and every runner reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from penstock.contract.errors import ConfigError

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh"]
NormKind: TypeAlias = Literal["rms", "layer"]
MatrixName: TypeAlias = Literal["qkv", "out", "mlp_in", "mlp_out"]
"""The matrices of a layer, as runners multiply with them."""
MATRICES: tuple[MatrixName, ...] = ("qkv", "out", "mlp_in", "mlp_out")


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All angles are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths are stretched by `factor`, short ones stay, between is blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """Behind the original length, theta grows with the position (NTK-aware)."""

    factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Channels that turn less than `beta_slow` times in the original length are stretched by `factor`, those that turn
    more than `beta_fast` times stay, between is blended; cosines and sines are multiplied (arXiv:2309.00071).
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    magnitude: float
    """Of cosines and sines."""
    whole_channels: bool
    """Whether the blend begins and ends at whole channels."""


@dataclass(frozen=True, slots=True)
class FactorsScaling:
    """Each frequency is divided by a factor of its own."""

    factors: tuple[float, ...]


Scaling: TypeAlias = LinearScaling | Llama3Scaling | DynamicScaling | YarnScaling | FactorsScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions, of a head's first `dim` channels."""

    theta: float
    dim: int
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMap:
    """Where a checkpoint keeps its tensors, without `.weight` and `.bias`; `{layer}` stands for the layer's index."""

    embedding: str
    final_norm: str
    head: str
    attention_norm: str
    qkv: tuple[str, ...]
    """Queries, keys and values; or one tensor with, for each key head, its queries' rows, its own and its value's."""
    q_norm: str | None = None
    k_norm: str | None = None
    """RMS norms of each head's queries and keys, before they are rotated; both or none."""
    out: str
    mlp_norm: str | None
    """None: the MLP reads what the attention's norm gave."""
    mlp_in: tuple[str, ...]
    """Gate and up where the MLP is gated, else the one matrix that its activation follows."""
    mlp_out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes and constants of a decoder. Raises ConfigError for sizes that are none."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Tokens that it can attend to, scaling of positions included."""
    norm: NormKind = "rms"
    norm_eps: float
    rope: Rope | None
    """None: positions are biases of the scores instead (ALiBi)."""
    windows: tuple[int | None, ...]
    """By layer: how many tokens each token sees, itself included; None: all before it."""
    activation: Activation = "silu"
    parallel_residual: bool = False
    """Whether the MLP reads what the attention reads, and not its result."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool
    names: NameMap

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} heads of queries do not share {self.num_kv_heads} of keys evenly")
        # Kernels rotate pairs of a head's channels, and take no more than it has.
        if self.rope is not None and (self.rope.dim % 2 or not 0 <= self.rope.dim <= self.head_dim):
            raise ConfigError(f"{self.rope.dim} channels of heads of {self.head_dim} cannot rotate in pairs")
        for window in self.windows:
            if window is not None and (not isinstance(window, int) or window < 1):
                raise ConfigError(f"a window is of {window!r} tokens, which is no size")

    def _check_numbers(self) -> None:
        sizes = {field.name: getattr(self, field.name) for field in fields(self) if field.type == "int"}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name} is {size!r}, which is no size")
        if not isinstance(self.norm_eps, int | float) or not 0 <= self.norm_eps < math.inf:
            raise ConfigError(f"norm_eps is {self.norm_eps!r}, which is no small number")

    @property
    def is_gated(self) -> bool:
        """Whether the MLP's activation is of a gate that its other input is multiplied by."""
        return len(self.names.mlp_in) > 1

    def parts_of(self, matrix: MatrixName) -> tuple[tuple[str, int], ...]:
        """The tensors whose rows make up a layer's matrix, as checkpoints name them, and how many rows each has."""
        names = self.names
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if matrix == "qkv":
            sizes = (queries, keys, keys) if len(names.qkv) > 1 else (queries + 2 * keys,)
            return tuple(zip(names.qkv, sizes, strict=True))
        if matrix == "mlp_in":
            return tuple((name, self.intermediate_size) for name in names.mlp_in)
        return ((names.out if matrix == "out" else names.mlp_out, self.hidden_size),)

    def columns_of(self, matrix: MatrixName) -> int:
        """Numbers that a layer's matrix multiplies with."""
        if matrix == "out":
            return self.num_heads * self.head_dim
        return self.intermediate_size if matrix == "mlp_out" else self.hidden_size


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of checkpoint: the architecture that its config.json names, and how that config becomes a spec."""

    architecture: str
    spec_of: Callable[[Mapping[str, Any]], ModelSpec]
