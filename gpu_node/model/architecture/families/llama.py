"""Llama 1 to 3 and models of the same architecture (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import Config, biased_attention, llama_layer, llama_mlp, llama_model
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec


def _spec_of(config: Config) -> ModelSpec:
    layer = llama_layer(biased_attention(config), llama_mlp(config, bias=bool(config.get("mlp_bias"))))
    return llama_model(config, (layer,) * config["num_hidden_layers"])


FAMILIES = (Family("LlamaForCausalLM", _spec_of),)
