"""Granite 3: Llama with factors for embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import Config, biased_attention, llama_layer, llama_mlp, llama_model
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec


def _spec_of(config: Config) -> ModelSpec:
    attention = biased_attention(config, score_scale=config.get("attention_multiplier", 1.0))
    layer = llama_layer(attention, llama_mlp(config, bias=bool(config.get("mlp_bias"))))
    return llama_model(
        config,
        (layer,) * config["num_hidden_layers"],
        embedding_scale=config.get("embedding_multiplier", 1.0),
        residual_scale=config.get("residual_multiplier", 1.0),
        logit_scale=1.0 / config.get("logits_scaling", 1.0),
    )


FAMILIES = (Family("GraniteForCausalLM", _spec_of),)
