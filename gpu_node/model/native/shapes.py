"""The sizes and constants of a model's spec as the kernels read them."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.recurrent import DeltaRule, Recurrence, StateSpace
from penstock.gpu_node.model.architecture.rope import Rope
from penstock.gpu_node.model.architecture.spec import LayerSpec, ModelSpec
from penstock.gpu_node.model.checkpoint.description import Description, state_slots_of
from penstock.gpu_node.model.native.ranks import RankPlace
from penstock.gpu_node.model.options import RunnerOptions
from penstock.kernels.cpu.library import Activation
from penstock.kernels.cpu.structs import KvFormat, NativeLayer, NativeShapes, NativeSpec

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
    "relu2": Activation.RELU2,
}
_FACTORS = (
    *("attention_factor", "mixer_factor", "state_gate_factor"),
    *("duration_factor", "gate_factor", "mlp_factor"),
)


def shapes_of(
    described: Description, options: RunnerOptions, num_blocks: int, kv_format: KvFormat, place: RankPlace
) -> NativeShapes:
    """Return the sizes and constants of a model and its layers for the kernels."""
    spec = described.spec
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
        embedding_scale=spec.embedding_scale,
        residual_scale=spec.residual_scale,
        logit_scale=spec.logit_scale,
        logit_cap=spec.logit_cap or 0.0,
        rank=place.rank,
        num_ranks=place.size,
        num_state_slots=state_slots_of(described, options),
    )
    if (inputs := spec.token_inputs) is not None:
        native.token_size = inputs.size
        native.token_scale, native.token_projection_scale = inputs.scale, inputs.projection_scale
    kinds = {layer: _native_layer(layer, spec.ropes) for layer in spec.kinds}
    return NativeShapes(native, (NativeLayer * spec.num_layers)(*(kinds[layer] for layer in spec.layers)))


def _native_layer(layer: LayerSpec, ropes: tuple[Rope, ...]) -> NativeLayer:
    attention, mlp = layer.attention, layer.mlp
    native = NativeLayer(
        is_parallel=layer.parallel_residual,
        has_attention_norm=layer.attention_norm is not None,
        has_mlp_norm=(layer.mlp_norm or layer.attention_norm) is not None,
        has_attention_output_norm=layer.post_attention_norm is not None,
        has_mlp_output_norm=layer.post_mlp_norm is not None,
        **dict.fromkeys(_FACTORS, 1.0),
    )
    if attention is not None:
        native.num_heads, native.num_kv_heads = attention.num_heads, attention.num_kv_heads
        native.head_dim, native.window = attention.head_dim, attention.window or 0
        native.rope = -1 if attention.rope is None else ropes.index(attention.rope)
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
    if mlp is not None and mlp.experts is not None:
        native.num_experts, native.experts_per_token = mlp.experts.count, mlp.experts.per_token
        native.normalizes_experts = mlp.experts.normalized
        native.shared_experts, native.shares_by_sigmoid = mlp.experts.num_shared, mlp.experts.by_sigmoid
        native.expert_scale = mlp.experts.scale
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
