"""Nemotron-H and Nemotron 3: layers of Mamba-2, of attention without positions, of an MLP, or of a mixture of experts.

A layer has only one of them. Durations of tokens have no lower limit, as in vLLM and llama.cpp. transformers gives them
the limit `time_step_min`, but only for prompts.
"""

from __future__ import annotations

from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.hf_config import LAYER, Config, activation_of, layers_of, llama_model
from penstock.gpu_node.model.architecture.mlp import Experts, Mlp, SharedExperts
from penstock.gpu_node.model.architecture.recurrent import StateSpace
from penstock.gpu_node.model.architecture.spec import Attention, Family, LayerSpec, ModelSpec

_DEFAULTS = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21_504,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_RENAMED = {
    "attention_head_dim": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "num_local_experts": "n_routed_experts",
}
"""Fields of older configs, and their names today."""
_KINDS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "mamba"),
    **dict.fromkeys(("*", "attention", "full_attention"), "attention"),
    **dict.fromkeys(("-", "mlp"), "mlp"),
    **dict.fromkeys(("E", "moe"), "moe"),
}
"""The kinds of layers by their names in `layers_block_type`, and by their letters in `hybrid_override_pattern`."""
_KIND_FIELDS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_MIXER = LAYER + "mixer."
_EXPERT = _MIXER + "experts.{expert}."
_SHARED = _MIXER + "shared_experts."
_REFUSED = {
    "moe_latent_size": (None, "experts of a smaller width"),
    "n_group": (1, "groups of experts"),
    "topk_group": (1, "groups of experts"),
    "attention_bias": (False, "attention with biases"),
}
"""Fields with the only value that is supported, and what another one means."""


def _spec_of(config: Config) -> ModelSpec:
    config = {**_DEFAULTS, **{_RENAMED.get(name, name): value for name, value in config.items()}}
    kinds = _kinds_of(config)
    if config.get("mamba_hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"mamba_hidden_act is {config['mamba_hidden_act']!r}, but only 'silu' is supported")
    for field, (only, meaning) in _REFUSED.items():
        if config.get(field, only) != only:
            raise ConfigError(f"{field} is {config[field]!r}, but {meaning} are not supported")
    made = {"mamba": _mamba, "attention": _attention, "mlp": _mlp, "moe": _moe}
    return llama_model(
        config,
        layers_of({"num_hidden_layers": len(kinds)}, kinds, lambda kind: made[kind](config)),
        norm_eps=config["layer_norm_epsilon"],
        max_position=config["max_position_embeddings"],
        embedding="model.embeddings",
        final_norm="model.norm_f",
    )


def _kinds_of(config: Config) -> tuple[str, ...]:
    field = next((one for one in _KIND_FIELDS if config.get(one)), _KIND_FIELDS[0])
    named = config.get(field)
    if not isinstance(named, list | str) or not named:
        raise ConfigError(f"{field} is {str(named)[:80]!r} but must name the kind of each layer")
    for at, name in enumerate(named):
        if name not in _KINDS:
            raise ConfigError(f"{field}[{at}] is {name!r}, but this family has only {', '.join(_KINDS)}")
    return tuple(_KINDS[name] for name in named)


def _attention(config: Config) -> LayerSpec:
    heads = config["num_attention_heads"]
    attention = Attention(
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"] or heads,
        head_dim=config["head_dim"] or config["hidden_size"] // heads,
        rope=None,
        qkv=(_MIXER + "q_proj", _MIXER + "k_proj", _MIXER + "v_proj"),
        out=_MIXER + "o_proj",
    )
    return LayerSpec(attention=attention, mlp=None, attention_norm=LAYER + "norm")


def _mamba(config: Config) -> LayerSpec:
    mixer = StateSpace(
        num_heads=config["mamba_num_heads"],
        head_dim=config["mamba_head_dim"],
        num_groups=config["n_groups"],
        state_size=config["ssm_state_size"],
        taps=config["conv_kernel"],
        norm_eps=config["layer_norm_epsilon"],
        has_bias=bool(config.get("use_bias")),
        has_convolution_bias=bool(config["use_conv_bias"]),
        inputs=_MIXER + "in_proj",
        convolution=_MIXER + "conv1d",
        duration_bias=_MIXER + "dt_bias",
        decay_log=_MIXER + "A_log",
        skip=_MIXER + "D",
        norm=_MIXER + "norm",
        out=_MIXER + "out_proj",
    )
    return LayerSpec(attention=None, recurrence=mixer, mlp=None, attention_norm=LAYER + "norm")


def _mlp(config: Config) -> LayerSpec:
    mlp = Mlp(
        intermediate_size=config["intermediate_size"],
        activation=activation_of(config, "mlp_hidden_act", "relu2"),
        bias=bool(config.get("mlp_bias")),
        mlp_in=(_MIXER + "up_proj",),
        mlp_out=_MIXER + "down_proj",
    )
    return LayerSpec(attention=None, mlp=mlp, mlp_norm=LAYER + "norm")


def _moe(config: Config) -> LayerSpec:
    size, shared = config["moe_intermediate_size"], config["moe_shared_expert_intermediate_size"]
    if not size or not shared or shared % size:
        said = f"moe_shared_expert_intermediate_size is {shared}"
        raise ConfigError(f"{said} but must be a multiple of moe_intermediate_size, which is {size}")
    if config.get("mlp_bias"):
        raise ConfigError("mlp_bias is true, but experts with biases are not supported")
    experts = Experts(
        config["n_routed_experts"],
        config["num_experts_per_tok"],
        normalized=bool(config["norm_topk_prob"]),
        router=_MIXER + "gate",
        by_sigmoid=True,
        choice_bias=_MIXER + "gate.e_score_correction_bias",
        scale=config["routed_scaling_factor"],
        shared=SharedExperts(shared // size, (_SHARED + "up_proj",), _SHARED + "down_proj"),
    )
    names: dict[str, Any] = {"mlp_in": (_EXPERT + "up_proj",), "mlp_out": _EXPERT + "down_proj"}
    mlp = Mlp(
        intermediate_size=size, activation=activation_of(config, "mlp_hidden_act", "relu2"), experts=experts, **names
    )
    return LayerSpec(attention=None, mlp=mlp, mlp_norm=LAYER + "norm")


FAMILIES = (Family("NemotronHForCausalLM", _spec_of),)
