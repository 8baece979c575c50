"""StarCoder 2: layer norms, biases in all projections, an MLP without a gate, and a window in all layers or none."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import (
    MLP,
    Config,
    activation_of,
    llama_attention,
    llama_layer,
    llama_mlp,
    llama_model,
)
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec


def _spec_of(config: Config) -> ModelSpec:
    config = {"tie_word_embeddings": True, "max_position_embeddings": 4096, **config}
    has_bias = bool(config.get("use_bias", True))
    attention = llama_attention(config, window=config.get("sliding_window"), qkv_bias=has_bias, out_bias=has_bias)
    mlp = llama_mlp(
        config,
        activation=activation_of(config, "hidden_act", "gelu_pytorch_tanh"),
        bias=has_bias,
        mlp_in=(MLP + "c_fc",),
        mlp_out=MLP + "c_proj",
    )
    layers = (llama_layer(attention, mlp),) * config["num_hidden_layers"]
    return llama_model(config, layers, norm="layer", norm_eps=config.get("norm_epsilon", 1e-5))


FAMILIES = (Family("Starcoder2ForCausalLM", _spec_of),)
