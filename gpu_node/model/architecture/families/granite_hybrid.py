"""Granite 4: layers of Mamba-2, some layers of attention, and an MLP that a mixture of experts may stand beside."""

from __future__ import annotations

from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.hf_config import (
    LAYER,
    Config,
    activation_of,
    biased_attention,
    head_dim_of,
    kinds_of,
    layers_of,
    llama_layer,
    llama_model,
    num_shared_experts,
    rope_of,
)
from penstock.gpu_node.model.architecture.mlp import Experts, Mlp, SharedExperts
from penstock.gpu_node.model.architecture.recurrent import StateSpace
from penstock.gpu_node.model.architecture.spec import Family, LayerSpec, ModelSpec

_DEFAULTS = {
    "shared_intermediate_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_MAMBA = LAYER + "mamba."
_MIXTURE = LAYER + "block_sparse_moe."
_EXPERT = _MIXTURE + "experts.{expert}."
_SHARED = LAYER + "shared_mlp."
_NO_LIMITS = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
_MAMBA_KINDS = ("mamba", "linear_attention")
_ATTENTION_KINDS = ("attention", "full_attention")


def _spec_of(config: Config) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    attention = biased_attention(config, score_scale=config.get("attention_multiplier", 1.0), rope=_rope_of(config))
    mlp, mixer = _mlp(config), _mixer(config)

    def layer(kind: str) -> LayerSpec:
        if kind in _MAMBA_KINDS:
            return llama_layer(None, mlp, recurrence=mixer)
        return llama_layer(attention, mlp)

    # transformers reads both names.
    field = "layer_types" if config.get("layer_types") else "layers_block_type"
    kinds = kinds_of(config, lambda at: "linear_attention", (*_MAMBA_KINDS, *_ATTENTION_KINDS), field)
    return llama_model(
        config,
        layers_of(config, kinds, layer),
        embedding_scale=config.get("embedding_multiplier", 1.0),
        residual_scale=config.get("residual_multiplier", 1.0),
        logit_scale=1.0 / config.get("logits_scaling", 1.0),
        max_position=config.get("max_position_embeddings", 2048),
    )


def _rope_of(config: Config) -> Any:
    return rope_of(config, head_dim_of(config)) if config.get("position_embedding_type") == "rope" else None


def _mixer(config: Config) -> StateSpace:
    limit = config.get("time_step_limit")
    if limit not in _NO_LIMITS:
        raise ConfigError(f"time_step_limit is {limit!r}, but only durations without limits are supported")
    width = config["mamba_expand"] * config["hidden_size"]
    size = config.get("mamba_d_head")
    head_dim = width // config["mamba_n_heads"] if size in (None, "auto") else size
    if head_dim * config["mamba_n_heads"] != width:
        sizes = f"mamba_d_head {head_dim} times mamba_n_heads {config['mamba_n_heads']}"
        raise ConfigError(f"{sizes} must be mamba_expand times hidden_size, {width}")
    return StateSpace(
        num_heads=config["mamba_n_heads"],
        head_dim=head_dim,
        num_groups=config["mamba_n_groups"],
        state_size=config["mamba_d_state"],
        taps=config["mamba_d_conv"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        has_bias=bool(config.get("mamba_proj_bias")),
        has_convolution_bias=bool(config["mamba_conv_bias"]),
        inputs=_MAMBA + "in_proj",
        convolution=_MAMBA + "conv1d",
        duration_bias=_MAMBA + "dt_bias",
        decay_log=_MAMBA + "A_log",
        skip=_MAMBA + "D",
        norm=_MAMBA + "norm",
        out=_MAMBA + "out_proj",
    )


def _mlp(config: Config) -> Mlp:
    size, shared = config["intermediate_size"], config["shared_intermediate_size"]
    activation = activation_of(config, "hidden_act", "silu")
    fused, out = _SHARED + "input_linear", _SHARED + "output_linear"
    if not config["num_local_experts"]:
        return Mlp(intermediate_size=shared, activation=activation, fused_gate=True, mlp_in=(fused,), mlp_out=out)
    num_shared = num_shared_experts(config, "shared_intermediate_size", "intermediate_size")
    experts = Experts(
        config["num_local_experts"],
        config["num_experts_per_tok"],
        normalized=True,
        router=_MIXTURE + "router.layer",
        shared=SharedExperts(num_shared, (fused,), out),
    )
    parts = (_EXPERT + "gate_proj", _EXPERT + "up_proj")
    return Mlp(
        intermediate_size=size, activation=activation, experts=experts, mlp_in=parts, mlp_out=_EXPERT + "down_proj"
    )


FAMILIES = (Family("GraniteMoeHybridForCausalLM", _spec_of),)
