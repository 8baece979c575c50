"""Mistral: Llama with a sliding window in every layer, or in none. Mixtral: the same with experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from penstock.gpu_node.model.architecture.hf_config import LAYER, LLAMA_NAMES, Config, llama_shapes
from penstock.gpu_node.model.architecture.spec import Experts, Family, ModelSpec

_DEFAULT_WINDOW = 4096
_MLP = LAYER + "block_sparse_moe."
_EXPERT = _MLP + "experts.{expert}."
_NAMES = replace(LLAMA_NAMES, router=_MLP + "gate", mlp_in=(_EXPERT + "w1", _EXPERT + "w3"), mlp_out=_EXPERT + "w2")


def _mistral(config: Config) -> ModelSpec:
    window = config.get("sliding_window", _DEFAULT_WINDOW)
    return ModelSpec(**llama_shapes(config), windows=(window,) * config["num_hidden_layers"])


def _mixtral(config: Config) -> ModelSpec:
    shapes = llama_shapes({"rms_norm_eps": 1e-5, "rope_theta": 1e6, **config})
    return ModelSpec(
        **shapes | {"names": _NAMES},
        windows=(config.get("sliding_window"),) * config["num_hidden_layers"],
        experts=Experts(
            config.get("num_local_experts") or config["num_experts"], config["num_experts_per_tok"], normalized=True
        ),
    )


FAMILIES = (Family("MistralForCausalLM", _mistral), Family("MixtralForCausalLM", _mixtral))
