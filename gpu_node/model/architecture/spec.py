"""The spec of a decoder: the record of its layers that every model family fills in and every runner reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.limits import MAX_EXPERT_MATRICES, check_positions
from penstock.gpu_node.model.architecture.mlp import Activation, Mixture, Mlp
from penstock.gpu_node.model.architecture.record_checks import IN_FILES, check_factors, check_sizes
from penstock.gpu_node.model.architecture.recurrent import DeltaRule, Parts, Recurrence
from penstock.gpu_node.model.architecture.rope import DynamicScaling, Rope
from penstock.gpu_node.model.protocol import MatrixName

NormKind: TypeAlias = Literal["rms", "layer"]
MATRICES: tuple[MatrixName, ...] = ("qkv", "out", "mlp_in", "mlp_out")
"""Those of a layer with one mixer and an MLP. With two mixers there is `mixer_out`, and of a mixture beside the MLP
`expert_in` and `expert_out`."""
_MIN_DYNAMIC_DIM = 4
"""Dynamic scaling divides by the rotated channels less 2."""


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """A factor of queries that grows with their positions: 1 + beta * log(1 + floor(position / length))."""

    beta: float
    length: int
    """The positions before this one have the factor 1."""

    def __post_init__(self) -> None:
        check_factors(self, "beta")
        check_sizes(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention of a layer. Names are those of a checkpoint's tensors, as in `LayerSpec`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    """None: queries and keys are not rotated."""
    interleaved: bool = False
    """Whether RoPE turns pairs of neighboring channels. Runners get the rows of queries and keys in the order of pairs
    that lie half a head apart."""
    has_position_biases: bool = False
    """Whether scores have position biases (ALiBi)."""
    window: int | None = None
    """The tokens that each token sees, itself included; None: all earlier tokens. In an encoder as many lie on its
    other side, and None are all tokens."""
    score_scale: float | None = None
    """The factor of scores; None: one by the square root of head_dim."""
    score_cap: float | None = None
    """Limit of scores: a score s becomes cap * tanh(s / cap)."""
    query_growth: QueryGrowth | None = None
    joint_head_norms: bool = False
    """Whether the norms of queries and keys span all heads of a token, instead of one head each."""
    output_gate: bool = False
    """Whether each head of the queries' tensor has the rows of its query, then those of a gate, whose sigmoid
    multiplies the head's output."""
    qkv_bias: bool = False
    out_bias: bool = False
    qkv_by_head: bool = True
    """Whether a fused qkv tensor holds, per KV head, the rows of its queries, key and value. Otherwise it holds all
    queries, then all keys, then all values."""
    qkv: tuple[str, ...]
    """Queries, keys and values; or one fused tensor (`qkv_by_head`)."""
    q_norm: str | None = None
    k_norm: str | None = None
    """RMS norms of queries and keys, applied before RoPE. Either both names are set or neither; with a `source`, keys
    have none."""
    value_norm: bool = False
    """Whether each head's value has an RMS norm without weights."""
    source: int | None = None
    """The layer whose keys and values this one reads; None: it has its own. With a source, `qkv` has queries alone."""
    sinks: str | None = None
    """A score of each head that takes a share of the attention and has no value. The name is complete."""
    head_gate: str | None = None
    """The matrix whose outputs say, by head, how much of its output is kept: their sigmoids multiply it."""
    output_factor: float = 1.0
    """The factor of the heads' outputs before the last projection."""
    out: str

    def __post_init__(self) -> None:
        check_sizes(self)
        check_factors(self, "score_scale", "score_cap", "output_factor")
        if self.num_heads % self.num_kv_heads:
            by = f"{IN_FILES['num_kv_heads']}, which is {self.num_kv_heads}"
            raise ConfigError(f"num_attention_heads is {self.num_heads} but must be a multiple of {by}")
        if self.output_gate and (self.is_fused or self.joint_head_norms):
            raise ConfigError("attention with output gates has a fused qkv tensor, or norms that span all heads")
        if self.source is not None and (len(self.qkv) != 1 or self.joint_head_norms):
            raise ConfigError("attention to another layer's keys has keys of its own, or norms that span all heads")
        window, rope = self.window, self.rope
        if window is not None and (not isinstance(window, int) or window < 1):
            raise ConfigError(f"sliding_window is {window!r} but must be a whole number of at least 1")
        if rope is None:
            return
        # Kernels rotate pairs of channels, and never more channels than a head has.
        if rope.dim % 2 or not 0 <= rope.dim <= self.head_dim:
            raise ConfigError(
                f"RoPE turns {rope.dim} channels of a head, which must be an even number from 0 to "
                f"{self.head_dim}: head_dim (without it hidden_size / num_attention_heads), times "
                "partial_rotary_factor or rotary_pct"
            )
        if isinstance(rope.scaling, DynamicScaling) and rope.dim < _MIN_DYNAMIC_DIM:
            needed = f"the rope_type dynamic needs at least {_MIN_DYNAMIC_DIM}"
            raise ConfigError(f"RoPE turns {rope.dim} channels of a head (head_dim), but {needed}")

    @property
    def queries(self) -> int:
        """The channels of all queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def query_rows(self) -> int:
        """The rows of the queries' tensor: those of the output gates count."""
        return 2 * self.queries if self.output_gate else self.queries

    @property
    def keys(self) -> int:
        """The channels of all keys of a token; its values have as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def is_fused(self) -> bool:
        """Whether one tensor has queries, keys and values."""
        return len(self.qkv) == 1 and self.source is None

    @property
    def input_parts(self) -> Parts:
        """The parts of the attention's first matrix."""
        queries, keys = self.query_rows, self.projected_keys
        sizes = (queries, keys, keys) if len(self.qkv) > 1 else (queries + 2 * keys,)
        return tuple(zip(self.qkv, sizes, strict=True))

    @property
    def projected_keys(self) -> int:
        """The channels of the keys that the layer computes: none if it reads those of another layer."""
        return 0 if self.source is not None else self.keys

    @property
    def value_dim(self) -> int:
        """The channels of a value: as many as those of a key."""
        return self.head_dim

    @property
    def chunk(self) -> int | None:
        """None: no family has chunks, of which each token sees its own alone."""
        return None

    @property
    def scale(self) -> float:
        """The factor of scores."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale


@dataclass(frozen=True, slots=True)
class TokenGate:
    """How a layer adds what its token's own embedding for this layer says (`TokenInputs`).

    The hidden state is projected to the embedding's size, activated, multiplied by the embedding, and projected back.
    """

    activation: Activation
    gate: str
    out: str
    norm: str
    """Of the output, before it is added to the hidden state."""


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """The embeddings that each token has for each layer, beside the one that enters the first layer.

    The first layer's input is projected to as many numbers, which are normed by layer. Both are added and halved in
    square.
    """

    size: int
    """The channels of each layer."""
    vocab_size: int
    scale: float
    """The factor of the embeddings."""
    projection_scale: float
    table: str
    """[vocab_size, layers * size]"""
    projection: str
    """[layers * size, hidden]"""
    norm: str

    def __post_init__(self) -> None:
        check_sizes(self)
        check_factors(self, "scale", "projection_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer. Layers of a kind share one record, because `{layer}` stands for the layer's index in its names.

    Names are those of a checkpoint's tensors, without `.weight` and `.bias`.
    """

    attention: Attention | None
    mlp: Mlp | None
    recurrence: Recurrence | None = None
    """A mixer in place of attention, or beside it. What is said here of the attention is true of it too. Two mixers
    read the same normed input, and both of their outputs are added to the hidden state."""
    parallel_residual: bool = False
    """Whether the MLP reads the layer's input, in parallel with the attention, instead of the attention's output."""
    attention_norm: str | None = None
    """None: the attention reads the hidden state without a norm."""
    post_attention_norm: str | None = None
    """The norm of the attention's output before it is added to the hidden state."""
    mlp_norm: str | None = None
    """None: the MLP's input is normed like the attention's."""
    post_mlp_norm: str | None = None
    """The norm of the MLP's output before it is added to the hidden state."""
    attention_sum_norm: str | None = None
    """The norm of the hidden state once the attention's output is added to it."""
    mlp_sum_norm: str | None = None
    """The norm of the hidden state once the MLP's output is added to it."""
    mixture: Mixture | None = None
    """A mixture of experts beside the MLP."""
    token_gate: TokenGate | None = None
    output_scale: str | None = None
    """A number that multiplies the hidden state behind the layer. The name is complete."""

    def __post_init__(self) -> None:
        if self.output_scale is not None and self.post_mlp_norm is None and self.token_gate is None:
            raise ConfigError("a layer's output is scaled, but what it adds last has no norm")
        if self.has_two_mixers and (self.parallel_residual or self.post_attention_norm is not None):
            raise ConfigError("a layer with two mixers has a parallel residual, or a norm of their outputs")
        if self.mixer is None and self.mlp is None:
            raise ConfigError("a layer has neither attention nor an MLP")
        if self.parallel_residual and (self.mixer is None or self.mlp is None):
            raise ConfigError("a layer has a parallel residual but not both attention and an MLP")
        if self.mixture is not None and (
            self.mlp is None or self.mlp.experts or self.post_mlp_norm is None or self.parallel_residual
        ):
            raise ConfigError("a mixture of experts stands beside no MLP, or what both return has no norm")

    @property
    def mixer(self) -> Attention | Recurrence | None:
        """What lets tokens see earlier ones."""
        return self.attention or self.recurrence

    @property
    def has_two_mixers(self) -> bool:
        """Whether attention and a recurrent mixer stand side by side."""
        return self.attention is not None and self.recurrence is not None

    @property
    def mlps(self) -> tuple[Mlp, ...]:
        """The MLP and the mixture of experts beside it, as far as the layer has them."""
        beside = None if self.mixture is None else self.mixture.mlp
        return tuple(mlp for mlp in (self.mlp, beside) if mlp is not None)

    @property
    def own_keys(self) -> Attention | None:
        """The attention, if the layer keeps keys and values of its own."""
        return self.attention if self.attention is not None and self.attention.source is None else None

    @property
    def matrices(self) -> tuple[MatrixName, ...]:
        """The matrices that the layer has. Of two mixers, `qkv` has all rows, and `mixer_out` is the second's."""
        of_mixer: tuple[MatrixName, ...] = () if self.mixer is None else ("qkv", "out")
        if self.has_two_mixers:
            of_mixer = ("qkv", "out", "mixer_out")
        of_mixture: tuple[MatrixName, ...] = () if self.mixture is None else ("expert_in", "expert_out")
        return of_mixer if self.mlp is None else (*of_mixer, "mlp_in", "mlp_out", *of_mixture)

    @property
    def adapted_matrices(self) -> tuple[MatrixName, ...]:
        """The matrices that LoRA adapters may change: not those of experts, but the gates of a delta rule."""
        gates: tuple[MatrixName, ...] = ("gates",) if isinstance(self.recurrence, DeltaRule) else ()
        dense = (one for one in self.matrices if (mlp := self.mlp_of(one)) is None or mlp.experts is None)
        return *dense, *gates

    def mlp_of(self, matrix: MatrixName) -> Mlp | None:
        """Return the MLP, or the mixture of experts, that has a matrix of this name; None for those of mixers."""
        if matrix.startswith("expert"):
            return None if self.mixture is None else self.mixture.mlp
        return self.mlp if matrix.startswith("mlp") else None

    def num_experts_of(self, matrix: MatrixName) -> int:
        """Return how many experts have a matrix of this name; 1 for the matrices of attention."""
        return 1 if (mlp := self.mlp_of(matrix)) is None else mlp.num_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderParts:
    """What an encoder has beside its layers. Its tokens see earlier and later ones, and it has no head of tokens."""

    embedding_norm: str | None
    """The norm of the sum of a token's embeddings."""
    token_types: str | None = None
    """An embedding of each type of token, which is added to the token's."""
    num_token_types: int = 0
    first_position: int = 0
    """The row of `position_embedding` that a text's first token has."""
    has_final_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The layers and constants of a decoder or an encoder. Raises ConfigError for invalid sizes."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    """The number of tokens that the model can attend to, with RoPE scaling applied."""
    norm: NormKind = "rms"
    norm_eps: float
    norm_bias: bool = True
    """Whether layer norms have biases in the checkpoint."""
    norm_offset: float = 0.0
    """Added to the stored weights of all norms."""
    logit_cap: float | None = None
    """Limit of logits: a logit s becomes cap * tanh(s / cap)."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """The factor of the outputs of attention and MLP before they are added to the hidden state."""
    logit_scale: float = 1.0
    token_inputs: TokenInputs | None = None
    encoder: EncoderParts | None = None
    """None for a decoder."""
    foreign_adapters: str = ""
    """Why adapters of the folder that a file was made of do not fit the file; empty: they do."""
    transposed: bool = False
    """Whether the matrices of layers are stored as [columns, rows]."""
    tied_head: bool
    embedding: str
    position_embedding: str | None = None
    """A vector for each of `max_position` positions, which is added to the embeddings of tokens."""
    final_norm: str
    head: str

    def __post_init__(self) -> None:
        check_sizes(self)
        if not isinstance(self.norm_eps, int | float) or not 0 <= self.norm_eps < math.inf:
            found = f"{IN_FILES['norm_eps']} is {self.norm_eps!r}"
            raise ConfigError(f"{found} but must be a finite number of at least 0")
        check_factors(self, "logit_cap", "embedding_scale", "residual_scale", "logit_scale")
        if not self.layers:
            raise ConfigError("num_hidden_layers is 0 but must be a whole number of at least 1")
        if any((layer.token_gate is None) != (self.token_inputs is None) for layer in self.kinds):
            raise ConfigError("either all layers or none have embeddings of their own for each token")
        self._check_sources()
        num_experts = sum(sum(mlp.num_experts for mlp in layer.mlps if mlp.experts) for layer in self.layers)
        if num_experts > MAX_EXPERT_MATRICES:
            found = f"the layers have {num_experts:,} experts"
            raise ConfigError(f"{found}, but a model may have {MAX_EXPERT_MATRICES:,} in all")
        self._check_positions()

    def _check_sources(self) -> None:
        for at, layer in enumerate(self.layers):
            if layer.attention is None or (source := layer.attention.source) is None:
                continue
            other = self.layers[source].attention if 0 <= source < at else None
            if other is None or other.source is not None:
                raise ConfigError(f"layer {at} reads the keys of layer {source}, which has none")
            if (other.num_kv_heads, other.head_dim) != (layer.attention.num_kv_heads, layer.attention.head_dim):
                raise ConfigError(f"layer {at} reads the keys of layer {source}, whose heads are others")

    def _check_positions(self) -> None:
        for rope in self.ropes:
            check_positions(self.max_position, rope.dim, has_own=isinstance(rope.scaling, DynamicScaling))
        biased = {(one.num_heads, one.head_dim) for one in self.attentions if one.has_position_biases}
        if len(biased) > 1:
            raise ConfigError(f"layers with position biases have different heads: {sorted(biased)}")
        for num_heads, _ in biased:
            check_positions(self.max_position, num_heads, has_own=True)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The different layers."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The different attentions of the layers."""
        return tuple(dict.fromkeys(layer.attention for layer in self.layers if layer.attention is not None))

    @property
    def recurrences(self) -> tuple[Recurrence, ...]:
        """The different recurrent mixers of the layers."""
        return tuple(dict.fromkeys(layer.recurrence for layer in self.layers if layer.recurrence is not None))

    @property
    def mlps(self) -> tuple[Mlp, ...]:
        """The different MLPs of the layers, and mixtures of experts."""
        return tuple(dict.fromkeys(mlp for layer in self.layers for mlp in layer.mlps))

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different RoPEs of the layers."""
        return tuple(dict.fromkeys(one.rope for one in self.attentions if one.rope is not None))

    @property
    def query_growths(self) -> tuple[QueryGrowth, ...]:
        """The different growths of the layers' queries."""
        return tuple(dict.fromkeys(one.query_growth for one in self.attentions if one.query_growth is not None))

    def within(self, max_model_len: int) -> ModelSpec:
        """Return the spec for texts of some length, without growths of queries that begin later."""

        def shortened(layer: LayerSpec) -> LayerSpec:
            attention = layer.attention
            if attention is None or attention.query_growth is None or attention.query_growth.length < max_model_len:
                return layer
            return replace(layer, attention=replace(attention, query_growth=None))

        made = {layer: shortened(layer) for layer in self.kinds}
        return replace(self, layers=tuple(made[layer] for layer in self.layers))

    @property
    def biased_attention(self) -> Attention | None:
        """An attention whose scores have position biases; all such ones have the same heads."""
        return next((one for one in self.attentions if one.has_position_biases), None)

    @property
    def num_weights(self) -> int:
        """The numbers in all matrices."""
        tables = (1 if self.tied_head else 2) * self.vocab_size * self.hidden_size
        return sum(map(self.layer_weights, self.layers)) + tables

    def layer_weights(self, layer: LayerSpec) -> int:
        """Return the numbers in the matrices of a layer."""
        gates = 2 * layer.recurrence.num_value_heads if isinstance(layer.recurrence, DeltaRule) else 0
        if layer.attention is not None and layer.attention.head_gate is not None:
            gates += layer.attention.num_heads
        if self.token_inputs is not None:
            # The gate, the product back, and the layer's part of the projection. No step multiplies the table.
            gates += 3 * self.token_inputs.size
        return gates * self.hidden_size + sum(
            layer.num_experts_of(matrix) * rows * self.columns_of(layer, matrix)
            for matrix in layer.matrices
            for _, rows in self.parts_of(layer, matrix)
        )

    def parts_of(self, layer: LayerSpec, matrix: MatrixName) -> tuple[tuple[str, int], ...]:
        """Return the checkpoint tensors that a layer's matrix consists of: each name and its number of rows.

        Empty for a matrix that the layer does not have.
        """
        mixer, mlp = layer.mixer, layer.mlp_of(matrix)
        if matrix == "qkv":
            of_attention = () if layer.attention is None else layer.attention.input_parts
            return of_attention + (() if layer.recurrence is None else layer.recurrence.input_parts)
        if mixer is not None and matrix == "out":
            return ((mixer.out, self.hidden_size),)
        if matrix == "gates":
            return layer.recurrence.gate_parts if isinstance(layer.recurrence, DeltaRule) else ()
        if matrix == "mixer_out":
            return ((layer.recurrence.out, self.hidden_size),) if layer.recurrence and layer.attention else ()
        if mlp is not None and matrix.endswith("in"):
            rows = 2 * mlp.intermediate_size if mlp.fused_gate else mlp.intermediate_size
            return tuple((name, rows) for name in mlp.mlp_in)
        return () if mlp is None else ((mlp.mlp_out, self.hidden_size),)

    def columns_of(self, layer: LayerSpec, matrix: MatrixName) -> int:
        """Return the number of columns of a layer's matrix, its input size; 0 if the layer does not have it."""
        if layer.recurrence is not None and matrix == ("out" if layer.attention is None else "mixer_out"):
            return layer.recurrence.outputs
        if matrix == "out":
            return 0 if layer.attention is None else layer.attention.queries
        if matrix in ("mlp_out", "expert_out"):
            return 0 if (mlp := layer.mlp_of(matrix)) is None else mlp.intermediate_size
        return self.hidden_size if matrix in (*layer.matrices, *layer.adapted_matrices) else 0


def state_bytes(spec: ModelSpec) -> int:
    """Return the bytes of a state slot, which holds the float32 states of all recurrent layers; 0 without any."""
    return 4 * sum(layer.recurrence.state_numbers for layer in spec.layers if layer.recurrence is not None)


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: the architecture that config.json names, and the function from config to spec."""

    architecture: str
    spec_of: Callable[[Mapping[str, Any]], ModelSpec]
    has_text_config: bool = False
    """Whether the config of the text model is the field `text_config` of the model's config."""
    is_for: Callable[[Mapping[str, Any]], bool] = lambda config: True
    """Whether the family computes a model with this config of the text model. Others may run in transformers."""
    origin: str = ""
    """The package and version that the family comes from; empty for penstock's own."""
