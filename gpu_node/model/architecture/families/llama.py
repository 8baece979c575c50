"""Llama 1 to 3 and models of the same architecture (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import Config, llama_shapes
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec


def _spec_of(config: Config) -> ModelSpec:
    attention_bias = bool(config.get("attention_bias"))
    return ModelSpec(
        **llama_shapes(config),
        windows=(None,) * config["num_hidden_layers"],
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias")),
    )


FAMILIES = (Family("LlamaForCausalLM", _spec_of),)
