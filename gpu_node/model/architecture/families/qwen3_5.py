"""Qwen 3.5 and Qwen3-Next: the gated delta rule in three of four layers, and attention with output gates in the others.

Of models with an image encoder only the text model inside is read. The tensors of the further prediction layer (`mtp.`)
are skipped, too.
"""

from __future__ import annotations

from typing import Any

from penstock.gpu_node.model.architecture.hf_config import (
    HEAD_NORMS,
    LAYER,
    MLP,
    Config,
    biased_attention,
    kinds_of,
    layers_of,
    llama_layer,
    llama_mlp,
    llama_model,
    max_position_of,
    num_experts_of,
    num_shared_experts,
    rope_of,
)
from penstock.gpu_node.model.architecture.mlp import Experts, Mlp, SharedExperts
from penstock.gpu_node.model.architecture.recurrent import DeltaRule
from penstock.gpu_node.model.architecture.spec import Family, LayerSpec, ModelSpec

_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DEFAULT_PERIOD = 4
_DEFAULT_ROTARY = 0.25
_MIXTURE_DEFAULTS = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
_NEXT_DEFAULTS = {"num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True}
_EXPERT = MLP + "experts.{expert}."
_SHARED = MLP + "shared_expert."
_LINEAR = LAYER + "linear_attn."


def _qwen3_5(config: Config) -> ModelSpec:
    return _model(config, has_experts=False)


def _qwen3_5_moe(config: Config) -> ModelSpec:
    return _model({**_MIXTURE_DEFAULTS, **config, "norm_topk_prob": True}, has_experts=True)


def _qwen3_next(config: Config) -> ModelSpec:
    """Return Qwen3-Next, whose delta rule has its projections in two tensors, and whose experts some layers lack."""
    config = {**_MIXTURE_DEFAULTS, **_NEXT_DEFAULTS, **config}
    return _model(config, has_experts=True, inputs=(_LINEAR + "in_proj_qkvz",), gates=_LINEAR + "in_proj_ba")


def _model(config: Config, *, has_experts: bool, **fused: Any) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    rope_settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = rope_settings.get("partial_rotary_factor", config.get("partial_rotary_factor", _DEFAULT_ROTARY))
    rope = rope_of(config, int(config["head_dim"] * share))
    period = config.get("full_attention_interval") or _DEFAULT_PERIOD

    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())

    def layer(kind: tuple[str, bool]) -> LayerSpec:
        name, is_mixture = kind
        mlp = _mixture(config) if is_mixture else llama_mlp(config)
        if name == "full_attention":
            return llama_layer(biased_attention(config, rope=rope, output_gate=True, **HEAD_NORMS), mlp)
        return llama_layer(None, mlp, recurrence=_delta_rule(config, **fused))

    names = kinds_of(
        config,
        lambda at: "linear_attention" if (at + 1) % period else "full_attention",
        ("linear_attention", "full_attention"),
    )
    kinds = [(name, has_experts and at not in dense and (at + 1) % step == 0) for at, name in enumerate(names)]
    return llama_model(
        config, layers_of(config, kinds, layer), norm_offset=1.0, max_position=max_position_of(config, rope)
    )


def _delta_rule(
    config: Config,
    *,
    inputs: tuple[str, ...] = (_LINEAR + "in_proj_qkv", _LINEAR + "in_proj_z"),
    gates: str | None = None,
) -> DeltaRule:
    """gates: the tensor that both gates share."""
    return DeltaRule(
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        taps=config["linear_conv_kernel_dim"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        inputs=inputs,
        learning_gate=gates or _LINEAR + "in_proj_b",
        decay_gate=gates or _LINEAR + "in_proj_a",
        convolution=_LINEAR + "conv1d",
        decay_log=_LINEAR + "A_log",
        decay_bias=_LINEAR + "dt_bias",
        norm=_LINEAR + "norm",
        out=_LINEAR + "out_proj",
    )


def _mixture(config: Config) -> Mlp:
    num_shared = num_shared_experts(config, "shared_expert_intermediate_size", "moe_intermediate_size")
    experts = Experts(
        num_experts_of(config),
        config["num_experts_per_tok"],
        normalized=bool(config["norm_topk_prob"]),
        router=MLP + "gate",
        shared=SharedExperts(
            num_shared,
            (_SHARED + "gate_proj", _SHARED + "up_proj"),
            _SHARED + "down_proj",
            gate=MLP + "shared_expert_gate",
        ),
    )
    return llama_mlp(
        config,
        intermediate_size=config["moe_intermediate_size"],
        experts=experts,
        mlp_in=(_EXPERT + "gate_proj", _EXPERT + "up_proj"),
        mlp_out=_EXPERT + "down_proj",
    )


FAMILIES = (
    Family("Qwen3_5ForCausalLM", _qwen3_5),
    Family("Qwen3_5ForConditionalGeneration", _qwen3_5, has_text_config=True),
    Family("Qwen3_5MoeForCausalLM", _qwen3_5_moe),
    Family("Qwen3NextForCausalLM", _qwen3_next),
    Family("Qwen3_5MoeForConditionalGeneration", _qwen3_5_moe, has_text_config=True),
)
