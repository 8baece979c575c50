"""Granite 3: Llama with factors for embeddings, attention scores, residuals and logits."""

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
        embedding_scale=config.get("embedding_multiplier", 1.0),
        score_scale=config.get("attention_multiplier", 1.0),
        residual_scale=config.get("residual_multiplier", 1.0),
        logit_scale=1.0 / config.get("logits_scaling", 1.0),
    )


FAMILIES = (Family("GraniteForCausalLM", _spec_of),)
