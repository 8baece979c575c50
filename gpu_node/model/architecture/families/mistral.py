"""Mistral: Llama with a sliding window in every layer, or in none. Mixtral: the same with experts in every layer.

Ministral 3 multiplies queries by a factor that grows with their positions. Mistral 3 is a model for images with a text
model of Mistral or Ministral 3 inside.
"""

from __future__ import annotations

from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.hf_config import (
    LAYER,
    Config,
    llama_attention,
    llama_layer,
    llama_mlp,
    llama_model,
    num_experts_of,
)
from penstock.gpu_node.model.architecture.mlp import Experts
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec, QueryGrowth
from penstock.gpu_node.model.architecture.transformers_class import kind_of

_DEFAULT_WINDOW = 4096
_MINISTRAL3_DEFAULTS = {"max_position_embeddings": 262_144, "head_dim": 128, "rms_norm_eps": 1e-5}
_MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MLP = LAYER + "block_sparse_moe."
_EXPERT = _MLP + "experts.{expert}."


def _mistral(config: Config) -> ModelSpec:
    attention = llama_attention(config, window=config.get("sliding_window", _DEFAULT_WINDOW))
    return llama_model(config, (llama_layer(attention, llama_mlp(config)),) * config["num_hidden_layers"])


def _ministral3(config: Config) -> ModelSpec:
    rope: Config = config.get("rope_parameters") or config.get("rope_scaling") or _MINISTRAL3_ROPE
    config = {**_MINISTRAL3_DEFAULTS, **config, "rope_parameters": rope}
    beta, growth = rope.get("llama_4_scaling_beta"), None
    if beta:
        growth = QueryGrowth(float(beta), int(rope["original_max_position_embeddings"]))
    attention = llama_attention(config, window=config.get("sliding_window"), query_growth=growth)
    return llama_model(config, (llama_layer(attention, llama_mlp(config)),) * config["num_hidden_layers"])


def _mistral3(config: Config) -> ModelSpec:
    """Return the text model of Mistral 3. Its own kind says which it is."""
    kinds = {"mistral": _mistral, "ministral3": _ministral3}
    if (kind := kind_of(config) or "mistral") not in kinds:
        raise ConfigError(f"text_config.model_type is {kind!r}, but Mistral 3 has only {', '.join(kinds)}")
    return kinds[kind]({"rms_norm_eps": 1e-5, **config})


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


FAMILIES = (
    Family("MistralForCausalLM", _mistral),
    Family("MixtralForCausalLM", _mixtral),
    Family("Ministral3ForCausalLM", _ministral3),
    Family("Mistral3ForConditionalGeneration", _mistral3, has_text_config=True),
)
