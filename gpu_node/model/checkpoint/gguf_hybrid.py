"""The configs of GGUF files of models with recurrent layers, as config.json has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.gguf_metadata import Metadata

_DEFAULT_PERIOD = 4
"""Of Qwen3.5 every fourth layer has attention, if the file does not say which."""

_DEFAULT_EPSILON = 1e-5
_DEFAULT_THETA = 10_000.0


def _qwen3_5(metadata: Metadata) -> dict[str, Any]:
    number, num_layers = metadata.number, metadata.num_layers
    head_dim, value_heads = number("attention.key_length"), number("ssm.time_step_rank")
    recurrent = metadata.of_layers("attention.recurrent_layers", num_layers)
    if recurrent is None:
        period = number("full_attention_interval", _DEFAULT_PERIOD)
        recurrent = [(layer + 1) % period != 0 for layer in range(num_layers)]
    return {
        "head_dim": head_dim,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "linear_conv_kernel_dim": number("ssm.conv_kernel"),
        "linear_key_head_dim": number("ssm.state_size"),
        "linear_num_key_heads": number("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": number("ssm.inner_size") // value_heads,
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": number("rope.freq_base"),
            "partial_rotary_factor": number("rope.dimension_count") / head_dim,
        },
    }


def _qwen3_5_dense(metadata: Metadata) -> dict[str, Any]:
    return {**_qwen3_5(metadata), "intermediate_size": metadata.number("feed_forward_length")}


def _qwen3_5_moe(metadata: Metadata) -> dict[str, Any]:
    number = metadata.number
    return {
        **_qwen3_5(metadata),
        "moe_intermediate_size": number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": number("expert_shared_feed_forward_length"),
        "num_experts": number("expert_count"),
        "num_experts_per_tok": number("expert_used_count"),
    }


def _qwen3_next(metadata: Metadata) -> dict[str, Any]:
    return {**_qwen3_5_moe(metadata), "norm_topk_prob": True}


def _lfm2(metadata: Metadata) -> dict[str, Any]:
    number, num_layers = metadata.number, metadata.num_layers
    if metadata.optional("attention.causal") is False:
        raise ConfigError(
            f"{metadata.architecture}.attention.causal is false, but tokens of LFM2 see only earlier ones"
        )
    if window := metadata.optional("attention.sliding_window"):
        said = f"{metadata.architecture}.attention.sliding_window is {window}"
        raise ConfigError(f"{said}, but LFM2 with windows is not supported")
    kv_heads = metadata.of_layers("attention.head_count_kv", num_layers) or [1] * num_layers
    return {
        "layer_types": ["full_attention" if count else "conv" for count in kv_heads],
        "conv_L_cache": number("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in metadata.tensors),
        "norm_eps": number("attention.layer_norm_rms_epsilon"),
        # Some published files state the width before LFM2's adjustment.
        "intermediate_size": _rows_of(metadata, "ffn_gate.weight") or number("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": number("rope.freq_base")},
    }


def _lfm2_moe(metadata: Metadata) -> dict[str, Any]:
    number = metadata.number
    return {
        **_lfm2(metadata),
        "moe_intermediate_size": number("expert_feed_forward_length"),
        "num_dense_layers": number("leading_dense_block_count"),
        "num_experts": number("expert_count"),
        "num_experts_per_tok": number("expert_used_count"),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in metadata.tensors),
    }


def _nemotron_h(metadata: Metadata) -> dict[str, Any]:
    number, num_layers, heads = metadata.number, metadata.num_layers, metadata.number("ssm.time_step_rank")
    eps = number("attention.layer_norm_epsilon", _DEFAULT_EPSILON)
    return {
        "layers_block_type": [_nemotron_kind(metadata, layer) for layer in range(num_layers)],
        "head_dim": number("attention.key_length"),
        "layer_norm_epsilon": number("attention.layer_norm_rms_epsilon", eps),
        "intermediate_size": _rows_of(metadata, "ffn_up.weight"),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in metadata.tensors),
        "mamba_num_heads": heads,
        "mamba_head_dim": number("ssm.inner_size") // heads,
        "ssm_state_size": number("ssm.state_size"),
        "n_groups": number("ssm.group_count"),
        "conv_kernel": number("ssm.conv_kernel"),
        "use_bias": any(name.endswith("ssm_in.bias") for name in metadata.tensors),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in metadata.tensors),
    }


def _nemotron_kind(metadata: Metadata, layer: int) -> str:
    """Return the kind of a layer, which only its tensors say."""
    kinds = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    for name, kind in kinds.items():
        if f"blk.{layer}.{name}.weight" in metadata.tensors:
            return kind
    raise ConfigError(f"blk.{layer} has none of the tensors {', '.join(kinds)}, by which layers are told apart")


def _rows_of(metadata: Metadata, ending: str) -> int:
    """Return the rows of the first tensor whose name has an ending; 0 without one."""
    return next((tensor.shape[0] for name, tensor in metadata.tensors.items() if name.endswith(f".{ending}")), 0)


def _nemotron_h_moe(metadata: Metadata) -> dict[str, Any]:
    number = metadata.number
    return {
        **_nemotron_h(metadata),
        "moe_intermediate_size": number("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": number("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.optional("moe_latent_size"),
        "n_routed_experts": number("expert_count"),
        "num_experts_per_tok": number("expert_used_count"),
        "n_group": number("expert_group_count", 1),
        "topk_group": number("expert_group_used_count", 1),
        "norm_topk_prob": bool(metadata.optional("expert_weights_norm")),
        "routed_scaling_factor": number("expert_weights_scale", 1.0),
    }


def _state_space(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Mamba-2 that Granite 4 and Falcon-H1 have."""
    number, heads = metadata.number, metadata.number("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": number("ssm.inner_size") // heads,
        "mamba_d_state": number("ssm.state_size"),
        "mamba_n_groups": number("ssm.group_count"),
        "mamba_d_conv": number("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in metadata.tensors),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": number("rope.freq_base", _DEFAULT_THETA)},
    }


def _granite_hybrid(metadata: Metadata) -> dict[str, Any]:
    """Return the config of Granite 4. A file without mixtures has the width of the shared MLP only in its tensors."""
    number, num_layers, hidden = metadata.number, metadata.num_layers, metadata.number("embedding_length")
    kv_heads = metadata.of_layers("attention.head_count_kv", num_layers) or [1] * num_layers
    has_experts = number("expert_count", 0) > 0
    shared = number("expert_shared_feed_forward_length") if has_experts else _rows_of(metadata, "ffn_gate.weight")
    rotates = metadata.optional("rope.scaling.finetuned") is not False
    head_dim = hidden // number("attention.head_count")
    turned = metadata.optional("rope.dimension_count")
    if rotates and turned not in (None, head_dim):
        said = f"granitehybrid.rope.dimension_count is {turned} but must be {head_dim}, the channels of a head"
        raise ConfigError(f"{said}: of Bamba only folders are supported, not GGUF files")
    return {
        **_state_space(metadata),
        "layer_types": ["full_attention" if count else "linear_attention" for count in kv_heads],
        "position_embedding_type": "rope" if rotates else "nope",
        "attention_multiplier": number("attention.scale", 0) or head_dim**-0.5,
        "embedding_multiplier": number("embedding_scale", 0) or 1.0,
        "residual_multiplier": number("residual_scale", 0) or 1.0,
        "logits_scaling": number("logit_scale", 0) or 1.0,
        "intermediate_size": number("feed_forward_length"),
        "shared_intermediate_size": shared,
        "num_local_experts": number("expert_count", 0),
        "num_experts_per_tok": number("expert_used_count", 0),
        "mamba_expand": number("ssm.inner_size") // hidden,
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in metadata.tensors),
        "attention_bias": any(name.endswith("attn_q.bias") for name in metadata.tensors),
    }


def _falcon_h1(metadata: Metadata) -> dict[str, Any]:
    """Return the config of Falcon-H1, whose factors the converter multiplies into the matrices."""
    number, known = metadata.number, ("ssm_conv1d.bias", "ssm_dt.bias")
    if others := [name for name in metadata.tensors if name.endswith(".bias") and not name.endswith(known)]:
        raise ConfigError(f"the file has {others[0]}, but projections with biases are not supported")
    return {
        **_state_space(metadata),
        "head_dim": number("attention.key_length"),
        "intermediate_size": number("feed_forward_length"),
        "mamba_d_ssm": number("ssm.inner_size"),
        "mamba_rms_norm": any(name.endswith("ssm_norm.weight") for name in metadata.tensors),
        "mamba_norm_before_gate": False,
    }


CONFIGS: Mapping[str, tuple[str, str, Callable[[Metadata], dict[str, Any]]]] = {
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text", _qwen3_5_dense),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _qwen3_5_moe),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next", _qwen3_next),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid", _granite_hybrid),
    "falcon-h1": ("FalconH1ForCausalLM", "falcon_h1", _falcon_h1),
    "lfm2": ("Lfm2ForCausalLM", "lfm2", _lfm2),
    "lfm2moe": ("Lfm2MoeForCausalLM", "lfm2_moe", _lfm2_moe),
    "nemotron_h": ("NemotronHForCausalLM", "nemotron_h", _nemotron_h),
    "nemotron_h_moe": ("NemotronHForCausalLM", "nemotron_h", _nemotron_h_moe),
}
"""GGUF's architectures, with `architectures`, `model_type` and the further fields of config.json."""
