"""Mistral: Llama with a sliding window in every layer, or in none. Mixtral: the same with experts in every layer."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import (
    LAYER,
    Config,
    llama_attention,
    llama_layer,
    llama_mlp,
    llama_model,
    num_experts_of,
)
from penstock.gpu_node.model.architecture.spec import Experts, Family, ModelSpec

_DEFAULT_WINDOW = 4096
_MLP = LAYER + "block_sparse_moe."
_EXPERT = _MLP + "experts.{expert}."


def _mistral(config: Config) -> ModelSpec:
    attention = llama_attention(config, window=config.get("sliding_window", _DEFAULT_WINDOW))
    return llama_model(config, (llama_layer(attention, llama_mlp(config)),) * config["num_hidden_layers"])


def _mixtral(config: Config) -> ModelSpec:
    config = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, **config}
    num_experts = num_experts_of(config)
    mlp = llama_mlp(
        config,
        experts=Experts(num_experts, config["num_experts_per_tok"], normalized=True, router=_MLP + "gate"),
        mlp_in=(_EXPERT + "w1", _EXPERT + "w3"),
        mlp_out=_EXPERT + "w2",
    )
    attention = llama_attention(config, window=config.get("sliding_window"))
    return llama_model(config, (llama_layer(attention, mlp),) * config["num_hidden_layers"])


FAMILIES = (Family("MistralForCausalLM", _mistral), Family("MixtralForCausalLM", _mixtral))
