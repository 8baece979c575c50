"""The shapes of a model as the native kernels take them, and which of them the kernels support."""

from __future__ import annotations

from collections.abc import Collection

from penstock.gpu_node.model.architecture.rank_part import kv_head_spans
from penstock.gpu_node.model.architecture.recurrent import LANES, DeltaRule, Recurrence, StateSpace
from penstock.gpu_node.model.architecture.spec import Attention, LayerSpec, ModelSpec
from penstock.gpu_node.model.architecture.windows import largest_window, windowed_layers
from penstock.gpu_node.model.checkpoint.description import Description, cache_sizes, state_slots_of
from penstock.gpu_node.model.checkpoint.window_blocks import WindowedTokens
from penstock.gpu_node.model.native.ranks import RankPlace
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.protocol import NO_WINDOWS, CacheSizes, WindowSizes
from penstock.kernels.cpu.library import Activation
from penstock.kernels.cpu.structs import PANEL, KvFormat, NativeLayer, NativeShapes, NativeSpec

PAGE_TOKENS = 16
MAX_HEAD_DIM = 512
CHUNK_TOKENS = 64
"""kChunk of src/attention/attention.h: a token reads whole chunks from that on in which its window begins."""
_STATE_COLUMNS = 32
"""kStateColumns of src/model/recurrent_stage.h."""
_KEY_GROUP = 32
"""Channels of a key in int8 that share a scale."""
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
    "relu2": Activation.RELU2,
}
KV_FORMATS = {
    "auto": KvFormat.BF16,
    "float16": KvFormat.F16,
    "bfloat16": KvFormat.BF16,
    "int8": KvFormat.INT8,
    # The kernels have no fp8. int8 takes as many bytes, besides its scales.
    "fp8": KvFormat.INT8,
}


class NativeUnavailableError(Exception):
    """The native kernels do not support this machine or this model; the message says why."""

    def __init__(self, reason: str, remedy: str) -> None:
        """`remedy`: what an operator does about it."""
        super().__init__(reason)
        self.remedy = remedy


def check_sizes(spec: ModelSpec) -> None:
    """Raise NativeUnavailableError for sizes that the kernels do not have."""
    for attention in spec.attentions:
        head_dim = attention.head_dim
        if head_dim % PAGE_TOKENS or head_dim > MAX_HEAD_DIM:
            reason = f"head_dim {head_dim} is not a multiple of {PAGE_TOKENS} of at most {MAX_HEAD_DIM}"
            raise NativeUnavailableError(reason, "use a model with another head_dim, or a GPU")
    if spec.token_inputs is not None and spec.token_inputs.size % PANEL:
        reason = f"tokens' embeddings for each layer have {spec.token_inputs.size} numbers, no multiple of {PANEL}"
        raise NativeUnavailableError(reason, "--runner torch")
    for mixer in spec.recurrences:
        _check_recurrence(mixer)
    for layer in spec.kinds:
        mlp = next((mlp for mlp in layer.mlps if mlp.experts is not None), None)
        if mlp is None:
            continue
        rows = PANEL // 2 if mlp.is_gated else PANEL
        if spec.hidden_size % PANEL or mlp.intermediate_size % rows:
            reason = f"experts with hidden size {spec.hidden_size} and intermediate size {mlp.intermediate_size}"
            reason += f" do not fill panels: multiples of {PANEL} and {rows} are needed"
            raise NativeUnavailableError(reason, "--runner torch")
        if (layer.post_mlp_norm is not None and layer.mixture is None) or (mlp.bias and not mlp.is_gated):
            reason = "experts with norms of their outputs, or with biases and without gates, are not supported"
            raise NativeUnavailableError(reason, "--runner torch")


def _check_recurrence(mixer: Recurrence) -> None:
    remedy = "--runner torch"
    if isinstance(mixer, StateSpace) and (mixer.head_dim % LANES or mixer.state_size % LANES):
        reason = f"state-space heads of {mixer.head_dim} channels with states of {mixer.state_size}"
        raise NativeUnavailableError(f"{reason}: multiples of {LANES} are needed", remedy)
    if mixer.channels % LANES:
        raise NativeUnavailableError(f"a convolution over {mixer.channels} channels, no multiple of {LANES}", remedy)
    if isinstance(mixer, DeltaRule) and (mixer.key_dim % LANES or mixer.value_dim % _STATE_COLUMNS):
        reason = f"recurrent heads with keys of {mixer.key_dim} and values of {mixer.value_dim} channels"
        needed = f"multiples of {LANES} and {_STATE_COLUMNS} are needed"
        raise NativeUnavailableError(f"{reason}: {needed}", remedy)


def kv_head_bytes(attention: Attention, kv_cache_dtype: str) -> int:
    """Return the bytes of the key and the value of one token, layer and KV head.

    int8 includes float32 scales: one of the value, and one of each group of the key's channels.
    """
    head_dim = attention.head_dim
    if KV_FORMATS[kv_cache_dtype] is not KvFormat.INT8:
        return 4 * head_dim
    return 2 * head_dim + 4 * (1 + -(-head_dim // _KEY_GROUP))


def token_bytes_of(
    spec: ModelSpec, kv_cache_dtype: str, place: RankPlace, layers: Collection[int] | None = None
) -> int:
    """Return the bytes of the keys and values of one token in a rank's cache, in all layers or some."""
    return sum(
        len(kv_head_spans(own, place.size)[place.rank]) * kv_head_bytes(own, kv_cache_dtype)
        for at, layer in enumerate(spec.layers)
        if (own := layer.own_keys) is not None and (layers is None or at in layers)
    )


def windowed_tokens_of(spec: ModelSpec, options: RunnerOptions) -> WindowedTokens | None:
    """Return what the kernels keep of each token in layers with windows, if they keep these apart.

    The ranks of a group do not: the steps that they are handed have one block table.
    """
    layers = windowed_layers(spec)
    if not layers or options.tensor_parallel_size > 1:
        return None
    token_bytes = token_bytes_of(spec, options.kv_cache_dtype, RankPlace(), layers)
    return WindowedTokens(token_bytes, largest_window(spec), CHUNK_TOKENS)


def cache_sizes_of(described: Description, options: RunnerOptions) -> CacheSizes:
    """Return the numbers and sizes of the KV blocks. Raises as `cache_sizes`."""
    token_bytes = token_bytes_of(described.spec, options.kv_cache_dtype, RankPlace())
    return cache_sizes(described.max_model_len, options, token_bytes, windowed_tokens_of(described.spec, options))


_FACTORS = (
    *("attention_factor", "mixer_factor", "state_gate_factor"),
    *("duration_factor", "gate_factor", "mlp_factor"),
)


def shapes_of(
    described: Description,
    options: RunnerOptions,
    num_blocks: int,
    kv_format: KvFormat,
    place: RankPlace,
    windows: WindowSizes = NO_WINDOWS,
) -> NativeShapes:
    """Return the shapes of a rank's model with a KV cache of some blocks. windows: those of layers with windows."""
    spec, encoder = described.spec, described.spec.encoder
    native = NativeSpec(
        num_layers=spec.num_layers,
        hidden=spec.hidden_size,
        vocab=spec.vocab_size,
        max_position=described.max_model_len,
        norm_eps=spec.norm_eps,
        block_size=options.block_size,
        num_blocks=num_blocks,
        kv_format=kv_format,
        hadamard_rotation=is_rotated(spec, options.quantization),
        has_layer_norms=spec.norm == "layer",
        num_ropes=len(spec.ropes),
        num_query_growths=len(spec.query_growths),
        embedding_scale=spec.embedding_scale,
        residual_scale=spec.residual_scale,
        logit_scale=spec.logit_scale,
        logit_cap=spec.logit_cap or 0.0,
        rank=place.rank,
        num_ranks=place.size,
        num_state_slots=state_slots_of(described, options),
        is_encoder=encoder is not None,
        has_final_norm=encoder is None or encoder.has_final_norm,
        has_embedding_norm=encoder is not None and encoder.embedding_norm is not None,
        num_window_blocks=windows.num_blocks and windows.num_blocks + 1,
    )
    if (inputs := spec.token_inputs) is not None:
        native.token_size = inputs.size
        native.token_scale, native.token_projection_scale = inputs.scale, inputs.projection_scale
    kinds = {layer: _native_layer(layer, spec) for layer in spec.kinds}
    layers = (NativeLayer * spec.num_layers)(*(kinds[layer] for layer in spec.layers))
    for at in windowed_layers(spec) if windows.num_blocks else ():
        layers[at].is_windowed = True
    return NativeShapes(native, layers)


def _native_layer(layer: LayerSpec, spec: ModelSpec) -> NativeLayer:
    attention, mlp = layer.attention, layer.mlp
    native = NativeLayer(
        is_parallel=layer.parallel_residual,
        has_attention_norm=layer.attention_norm is not None,
        has_mlp_norm=(layer.mlp_norm or layer.attention_norm) is not None,
        has_attention_output_norm=layer.post_attention_norm is not None,
        has_mlp_output_norm=layer.post_mlp_norm is not None,
        has_attention_sum_norm=layer.attention_sum_norm is not None,
        has_mlp_sum_norm=layer.mlp_sum_norm is not None,
        **dict.fromkeys(_FACTORS, 1.0),
    )
    if attention is not None:
        native.num_heads, native.num_kv_heads = attention.num_heads, attention.num_kv_heads
        native.head_dim, native.window = attention.head_dim, attention.window or 0
        native.rope = -1 if attention.rope is None else spec.ropes.index(attention.rope)
        if (growth := attention.query_growth) is not None:
            native.query_growth = 1 + spec.query_growths.index(growth)
        native.rotary_dim = 0 if attention.rope is None else attention.rope.dim
        native.has_position_biases = attention.has_position_biases
        native.joins_head_norms = attention.joint_head_norms
        native.score_scale, native.score_cap = attention.score_scale or 0.0, attention.score_cap or 0.0
        native.has_output_gate, native.has_value_norm = attention.output_gate, attention.value_norm
        native.has_head_gates, native.attention_factor = attention.head_gate is not None, attention.output_factor
        native.source = 0 if attention.source is None else 1 + attention.source
    if layer.recurrence is not None:
        _set_recurrence(native, layer.recurrence)
    if layer.token_gate is not None:
        native.token_activation = _ACTIVATIONS[layer.token_gate.activation]
    if mlp is not None:
        native.intermediate, native.is_gated = mlp.intermediate_size, mlp.is_gated
        native.activation = _ACTIVATIONS[mlp.activation]
        native.gate_factor, native.mlp_factor = mlp.gate_factor, mlp.output_factor
        if mlp.clamped_gate is not None:
            native.gate_limit, native.gate_slope = mlp.clamped_gate.limit, mlp.clamped_gate.slope
    if layer.mixture is not None:
        native.expert_intermediate = layer.mixture.mlp.intermediate_size
    for routed in layer.mlps:
        if (experts := routed.experts) is not None:
            native.num_experts, native.experts_per_token = experts.count, experts.per_token
            native.normalizes_experts, native.expert_scale = experts.normalized, experts.scale
            native.shared_experts, native.shares_by_sigmoid = experts.num_shared, experts.by_sigmoid
            native.has_router_norm = experts.router_norm is not None
    return native


def _set_recurrence(native: NativeLayer, mixer: Recurrence) -> None:
    native.taps, native.channels = mixer.taps, mixer.channels
    if isinstance(mixer, DeltaRule):
        native.key_heads, native.value_heads = mixer.num_key_heads, mixer.num_value_heads
        native.key_dim, native.value_dim, native.head_norm_eps = mixer.key_dim, mixer.value_dim, mixer.norm_eps
        native.tiles_values = mixer.tiles_values
    if isinstance(mixer, StateSpace):
        native.is_state_space, native.mixer_factor = True, mixer.output_factor
        native.state_gate_factor, *_, native.duration_factor = mixer.input_factors
        native.key_heads, native.value_heads = mixer.num_groups, mixer.num_heads
        native.key_dim, native.value_dim, native.head_norm_eps = mixer.state_size, mixer.head_dim, mixer.norm_eps


def is_rotated(spec: ModelSpec, quantization: str) -> bool:
    """Return whether the hidden state is Hadamard-rotated, which spreads outlier channels over all channels.

    Only int8 needs it: a row has a single scale there, while grouped formats have one per group. RMS norms commute
    with the rotation if a matrix follows that their weights can be multiplied into: norms of outputs do not, nor do a
    router and the gates of a recurrent mixer. Layer norms do not either, because they subtract the mean over channels.
    """
    has_output_norms = any(layer.post_attention_norm or layer.post_mlp_norm for layer in spec.kinds)
    # The router of a mixture and the gates of a recurrent mixer are no matrices that the weights are multiplied into.
    is_read = any(mlp.experts for mlp in spec.mlps) or bool(spec.recurrences) or spec.token_inputs is not None
    return quantization == "int8" and spec.norm == "rms" and not has_output_norms and not is_read
