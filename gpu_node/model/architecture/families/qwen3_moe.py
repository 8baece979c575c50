"""Qwen3 with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.hf_config import (
    HEAD_NORMS,
    LAYER,
    LLAMA_NAMES,
    Config,
    llama_shapes,
    sliding_windows,
)
from penstock.gpu_node.model.architecture.spec import Experts, Family, ModelSpec

_EXPERT = LAYER + "mlp.experts.{expert}."
_NAMES = replace(
    LLAMA_NAMES,
    **HEAD_NORMS,
    router=LAYER + "mlp.gate",
    mlp_in=(_EXPERT + "gate_proj", _EXPERT + "up_proj"),
    mlp_out=_EXPERT + "down_proj",
)


def _spec_of(config: Config) -> ModelSpec:
    for name, expected in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        if (config.get(name) or expected) != expected:
            raise ConfigError(f"{name} {config[name]!r} is not supported; every layer must have experts")
    attention_bias = bool(config.get("attention_bias"))
    shapes = llama_shapes({**config, "intermediate_size": config["moe_intermediate_size"]})
    return ModelSpec(
        **shapes | {"names": _NAMES},
        windows=sliding_windows(config),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        experts=Experts(
            config.get("num_experts") or config["num_local_experts"],
            config["num_experts_per_tok"],
            normalized=bool(config.get("norm_topk_prob")),
        ),
    )


FAMILY = Family("Qwen3MoeForCausalLM", _spec_of)
