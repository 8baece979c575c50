"""The spec of a decoder: one record that every model family fills in and every runner reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.limits import MAX_EXPERT_MATRICES, check_positions
from penstock.gpu_node.model.protocol import MatrixName

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh"]
NormKind: TypeAlias = Literal["rms", "layer"]
MATRICES: tuple[MatrixName, ...] = ("qkv", "out", "mlp_in", "mlp_out")
_IN_FILES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads (num_kv_heads)",
    "head_dim": "head_dim (without it hidden_size / num_attention_heads)",
    "max_position": "max_position_embeddings (times the factor of RoPE scaling)",
    "norm_eps": "rms_norm_eps (layer_norm_eps, layer_norm_epsilon)",
    "score_scale": "attention_multiplier (query_pre_attn_scalar)",
    "score_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""What fields of a spec are called in config.json, for a reader of an error."""
_MIN_DYNAMIC_DIM = 4
"""Dynamic scaling divides by the rotated channels less 2."""


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

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            ends = f"{self.high_freq_factor} for low_freq_factor {self.low_freq_factor}"
            raise ConfigError(f"high_freq_factor is {ends}, but must be above it")


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


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE scaling (arXiv:2402.13753), which divides each frequency by its own factor from one of two tables.

    A model that serves more than `original_max_position` tokens uses the long table at all positions. The angles of a
    position therefore do not depend on how long its text has become.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    magnitude: float
    """The factor that all cosines and sines are multiplied by."""


Scaling: TypeAlias = LinearScaling | Llama3Scaling | DynamicScaling | YarnScaling | FactorsScaling | LongScaling


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
    attention_norm: str | None
    """None: the attention reads the hidden state without a norm."""
    qkv: tuple[str, ...]
    """Queries, keys and values; or one fused tensor (`ModelSpec.qkv_by_head`)."""
    q_norm: str | None = None
    k_norm: str | None = None
    """RMS norms of queries and keys, applied before RoPE. Either both names are set or neither."""
    out: str
    post_attention_norm: str | None = None
    """The norm of the attention's output before it is added to the hidden state."""
    mlp_norm: str | None
    """None: the MLP's input is normed like the attention's."""
    router: str | None = None
    """The matrix that scores the experts, in a model with `ModelSpec.experts`."""
    mlp_in: tuple[str, ...]
    """Gate and up projections of a gated MLP, else the single input projection; `{expert}` stands for the index of an
    expert. A gated MLP with a single tensor has both in it, the gate first (`ModelSpec.fused_gate`)."""
    mlp_out: str
    post_mlp_norm: str | None = None
    """The norm of the MLP's output before it is added to the hidden state."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: a router chooses a few MLPs for each token, and their weighted outputs are added."""

    count: int
    per_token: int
    normalized: bool
    """Whether the weights of a token's experts are divided by their sum."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ConfigError(f"num_experts_per_tok is {self.per_token} but must be from 1 to {self.count} experts")


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
    norm_offset: float = 0.0
    """Added to the stored weights of all norms."""
    joint_head_norms: bool = False
    """Whether the norms of queries and keys span all heads of a token, instead of one head each."""
    rope: Rope | None
    """None: attention scores have position biases instead (ALiBi)."""
    layer_ropes: tuple[Rope | None, ...] = ()
    """Per layer: its RoPE, None for a layer without positions. Empty: all layers have `rope`."""
    score_scale: float | None = None
    """The factor of attention scores; None: one by the square root of head_dim."""
    score_cap: float | None = None
    """Limit of attention scores: a score s becomes cap * tanh(s / cap)."""
    logit_cap: float | None = None
    """Limit of logits, like `score_cap`."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """The factor of the outputs of attention and MLP before they are added to the hidden state."""
    logit_scale: float = 1.0
    windows: tuple[int | None, ...]
    """Per layer: the attention window in tokens, the token itself included; None: all earlier tokens."""
    activation: Activation = "silu"
    parallel_residual: bool = False
    """Whether the MLP reads the layer's input, in parallel with the attention, instead of the attention's output."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qkv_by_head: bool = True
    """Whether a fused qkv tensor holds, per KV head, the rows of its queries, key and value. Otherwise it holds all
    queries, then all keys, then all values."""
    fused_gate: bool = False
    experts: Experts | None = None
    """None: each layer has one MLP. `intermediate_size` is that of an expert."""
    tied_head: bool
    names: NameMap

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.experts is not None and self.num_layers * self.experts.count > MAX_EXPERT_MATRICES:
            found = f"{self.num_layers} layers have {self.experts.count} experts each"
            raise ConfigError(f"{found}, but a model may have {MAX_EXPERT_MATRICES:,} in all")
        if self.num_heads % self.num_kv_heads:
            by = f"{_IN_FILES['num_kv_heads']}, which is {self.num_kv_heads}"
            raise ConfigError(f"num_attention_heads is {self.num_heads} but must be a multiple of {by}")
        self._check_positions()
        for name, values in (("windows", self.windows), ("layer_ropes", self.ropes)):
            if len(values) != self.num_layers:
                raise ConfigError(f"{name} has {len(values)} entries for {self.num_layers} layers")
        for window in self.windows:
            if window is not None and (not isinstance(window, int) or window < 1):
                raise ConfigError(f"sliding_window is {window!r} but must be a whole number of at least 1")

    def _check_positions(self) -> None:
        if self.rope is None:
            check_positions(self.max_position, self.num_heads, has_own=True)
        for rope in dict.fromkeys(self.ropes):
            # Kernels rotate pairs of channels, and never more channels than a head has.
            if rope is None:
                continue
            if rope.dim % 2 or not 0 <= rope.dim <= self.head_dim:
                raise ConfigError(
                    f"RoPE turns {rope.dim} channels of a head, which must be an even number from 0 to "
                    f"{self.head_dim}: head_dim (without it hidden_size / num_attention_heads), times "
                    "partial_rotary_factor or rotary_pct"
                )
            is_dynamic = isinstance(rope.scaling, DynamicScaling)
            if is_dynamic and rope.dim < _MIN_DYNAMIC_DIM:
                needed = f"the rope_type dynamic needs at least {_MIN_DYNAMIC_DIM}"
                raise ConfigError(f"RoPE turns {rope.dim} channels of a head (head_dim), but {needed}")
            check_positions(self.max_position, rope.dim, has_own=is_dynamic)

    def _check_numbers(self) -> None:
        sizes = {field.name: getattr(self, field.name) for field in fields(self) if field.type == "int"}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{_IN_FILES.get(name, name)} is {size!r} but must be a whole number of at least 1")
        if not isinstance(self.norm_eps, int | float) or not 0 <= self.norm_eps < math.inf:
            found = f"{_IN_FILES['norm_eps']} is {self.norm_eps!r}"
            raise ConfigError(f"{found} but must be a finite number of at least 0")
        for name in ("score_scale", "score_cap", "logit_cap", "embedding_scale", "residual_scale", "logit_scale"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ConfigError(f"{_IN_FILES[name]} is {value!r} but must be a finite number above 0")

    @property
    def is_gated(self) -> bool:
        """Whether the MLP is gated: its activation applies to the gate, which multiplies the up projection."""
        return self.fused_gate or len(self.names.mlp_in) > 1

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The RoPE of each layer; None where it has none."""
        return self.layer_ropes or (self.rope,) * self.num_layers

    @property
    def num_weights(self) -> int:
        """The numbers in all matrices."""
        times = {"mlp_in": self.experts.count, "mlp_out": self.experts.count} if self.experts is not None else {}
        layer = sum(
            times.get(matrix, 1) * rows * self.columns_of(matrix)
            for matrix in MATRICES
            for _, rows in self.parts_of(matrix)
        )
        return self.num_layers * layer + (1 if self.tied_head else 2) * self.vocab_size * self.hidden_size

    @property
    def adapted_matrices(self) -> tuple[MatrixName, ...]:
        """The matrices of a layer that LoRA adapters may change: not those of experts."""
        return MATRICES if self.experts is None else ("qkv", "out")

    def parts_of(self, matrix: MatrixName) -> tuple[tuple[str, int], ...]:
        """Return the checkpoint tensors that a layer's matrix consists of: each name and its number of rows."""
        names = self.names
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if matrix == "qkv":
            sizes = (queries, keys, keys) if len(names.qkv) > 1 else (queries + 2 * keys,)
            return tuple(zip(names.qkv, sizes, strict=True))
        if matrix == "mlp_in":
            rows = 2 * self.intermediate_size if self.fused_gate else self.intermediate_size
            return tuple((name, rows) for name in names.mlp_in)
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
