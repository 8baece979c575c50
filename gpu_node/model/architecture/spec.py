"""The spec of a decoder: one record that every model family fills in and every runner reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from penstock.contract.errors import ConfigError

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh"]
NormKind: TypeAlias = Literal["rms", "layer"]
MatrixName: TypeAlias = Literal["qkv", "out", "mlp_in", "mlp_out"]
"""The matrices of a layer; runners compute one matrix product for each."""
MATRICES: tuple[MatrixName, ...] = ("qkv", "out", "mlp_in", "mlp_out")


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """RoPE scaling that divides all angles by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's RoPE scaling: stretch long wavelengths by `factor`, keep short ones, and interpolate between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK-aware RoPE scaling: past the original length, theta grows with the position."""

    factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN RoPE scaling (arXiv:2309.00071).

    Channels with fewer than `beta_slow` rotations within the original length are stretched by `factor`. Channels with
    more than `beta_fast` rotations stay the same; those between are interpolated.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    magnitude: float
    """The factor that all cosines and sines are multiplied by."""
    whole_channels: bool
    """Whether the bounds of the interpolated range are rounded to whole channels."""


@dataclass(frozen=True, slots=True)
class FactorsScaling:
    """RoPE scaling that divides each frequency by its own factor."""

    factors: tuple[float, ...]


Scaling: TypeAlias = LinearScaling | Llama3Scaling | DynamicScaling | YarnScaling | FactorsScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over the first `dim` channels of each head."""

    theta: float
    dim: int
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NameMap:
    """The tensor names of a checkpoint, without `.weight` and `.bias`; `{layer}` stands for the layer index."""

    embedding: str
    final_norm: str
    head: str
    attention_norm: str
    qkv: tuple[str, ...]
    """Queries, keys and values; or one fused tensor that holds, per KV head, the rows of its queries, key and value."""
    q_norm: str | None = None
    k_norm: str | None = None
    """RMS norms of each head's queries and keys, applied before RoPE. Either both names are set or neither."""
    out: str
    mlp_norm: str | None
    """None: the MLP reads the output of the attention norm."""
    mlp_in: tuple[str, ...]
    """Gate and up projections of a gated MLP, else the single input projection."""
    mlp_out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shapes and constants of a decoder. Raises ConfigError for invalid sizes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """The number of tokens that the model can attend to, with RoPE scaling applied."""
    norm: NormKind = "rms"
    norm_eps: float
    rope: Rope | None
    """None: attention scores have position biases instead (ALiBi)."""
    windows: tuple[int | None, ...]
    """Per layer: the attention window in tokens, the token itself included; None: all earlier tokens."""
    activation: Activation = "silu"
    parallel_residual: bool = False
    """Whether the MLP reads the layer's input, in parallel with the attention, instead of the attention's output."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool
    names: NameMap

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        # Kernels rotate pairs of channels, and never more channels than a head has.
        if self.rope is not None and (self.rope.dim % 2 or not 0 <= self.rope.dim <= self.head_dim):
            raise ConfigError(
                f"rope dim is {self.rope.dim} but must be an even number from 0 to head_dim {self.head_dim}"
            )
        for window in self.windows:
            if window is not None and (not isinstance(window, int) or window < 1):
                raise ConfigError(f"an attention window is {window!r} but must be a whole number of at least 1")

    def _check_numbers(self) -> None:
        sizes = {field.name: getattr(self, field.name) for field in fields(self) if field.type == "int"}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name} is {size!r} but must be a whole number of at least 1")
        if not isinstance(self.norm_eps, int | float) or not 0 <= self.norm_eps < math.inf:
            raise ConfigError(f"norm_eps is {self.norm_eps!r} but must be a finite number of at least 0")

    @property
    def is_gated(self) -> bool:
        """Whether the MLP is gated: its activation applies to the gate, which multiplies the up projection."""
        return len(self.names.mlp_in) > 1

    def parts_of(self, matrix: MatrixName) -> tuple[tuple[str, int], ...]:
        """Return the checkpoint tensors that a layer's matrix consists of: each name and its number of rows."""
        names = self.names
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if matrix == "qkv":
            sizes = (queries, keys, keys) if len(names.qkv) > 1 else (queries + 2 * keys,)
            return tuple(zip(names.qkv, sizes, strict=True))
        if matrix == "mlp_in":
            return tuple((name, self.intermediate_size) for name in names.mlp_in)
        return ((names.out if matrix == "out" else names.mlp_out, self.hidden_size),)

    def columns_of(self, matrix: MatrixName) -> int:
        """Return the number of columns of a layer's matrix, its input size."""
        if matrix == "out":
            return self.num_heads * self.head_dim
        return self.intermediate_size if matrix == "mlp_out" else self.hidden_size


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: the architecture that config.json names, and the function from config to spec."""

    architecture: str
    spec_of: Callable[[Mapping[str, Any]], ModelSpec]
