"""Qwen 2, 2.5 and 3: Llama with biases in the projections of attention, or with norms of each head's queries and keys.

The mixture of experts of Qwen 3 is in every layer.
"""

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

_QWEN3_HEAD_DIM = 128
_EXPERT = LAYER + "mlp.experts.{expert}."
_NAMES = replace(
    LLAMA_NAMES,
    **HEAD_NORMS,
    router=LAYER + "mlp.gate",
    mlp_in=(_EXPERT + "gate_proj", _EXPERT + "up_proj"),
    mlp_out=_EXPERT + "down_proj",
)


def _qwen2(config: Config) -> ModelSpec:
    return ModelSpec(**llama_shapes(config), windows=sliding_windows(config), qkv_bias=True)


def _qwen3(config: Config) -> ModelSpec:
    attention_bias = bool(config.get("attention_bias"))
    shapes = llama_shapes({"head_dim": _QWEN3_HEAD_DIM, **config})
    shapes["names"] = replace(LLAMA_NAMES, **HEAD_NORMS)
    return ModelSpec(**shapes, windows=sliding_windows(config), qkv_bias=attention_bias, out_bias=attention_bias)


def _qwen3_moe(config: Config) -> ModelSpec:
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


FAMILIES = (
    Family("Qwen2ForCausalLM", _qwen2),
    Family("Qwen3ForCausalLM", _qwen3),
    Family("Qwen3MoeForCausalLM", _qwen3_moe),
)
