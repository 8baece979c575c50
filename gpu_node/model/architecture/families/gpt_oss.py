"""gpt-oss: attention sinks, a window in every other layer, and experts with biases and clamped gates in every layer."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import (
    ATTENTION,
    MLP,
    Config,
    biased_attention,
    layers_of,
    llama_layer,
    llama_mlp,
    llama_model,
    num_experts_of,
    windows_of_kinds,
)
from penstock.gpu_node.model.architecture.mlp import ClampedGate, Experts
from penstock.gpu_node.model.architecture.spec import Family, LayerSpec, ModelSpec

_EXPERT = MLP + "experts.{expert}."
_DEFAULT_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "attention_bias": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}


def _gpt_oss(config: Config) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config["rope_parameters"] = _DEFAULT_ROPE
    mlp = llama_mlp(
        config,
        clamped_gate=ClampedGate(limit=config["swiglu_limit"], slope=config["swiglu_alpha"]),
        bias=True,
        experts=Experts(
            num_experts_of(config),
            config["num_experts_per_tok"],
            normalized=True,
            router=MLP + "router",
            router_bias=True,
        ),
        mlp_in=(_EXPERT + "gate_proj", _EXPERT + "up_proj"),
        mlp_out=_EXPERT + "down_proj",
    )

    def layer(window: int | None) -> LayerSpec:
        return llama_layer(biased_attention(config, window=window, sinks=ATTENTION + "sinks"), mlp)

    return llama_model(config, layers_of(config, windows_of_kinds(config, period=2), layer))


FAMILIES = (Family("GptOssForCausalLM", _gpt_oss),)
