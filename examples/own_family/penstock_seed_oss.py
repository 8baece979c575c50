"""A model family in a package of its own: Seed-OSS, which is Llama with biases of queries, keys and values.

`pip install examples/own_family`, and `penstock serve` computes its models by the native runner, as its own families.
"""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import Config, llama_attention, llama_layer, llama_mlp, llama_model
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec


def spec_of(config: Config) -> ModelSpec:
    """Return what a config.json describes."""
    config = {"head_dim": 128, "attention_bias": True, **config}
    attention = llama_attention(
        config, qkv_bias=bool(config["attention_bias"]), out_bias=bool(config.get("attention_out_bias"))
    )
    layer = llama_layer(attention, llama_mlp(config, bias=bool(config.get("mlp_bias"))))
    return llama_model(config, (layer,) * config["num_hidden_layers"])


FAMILIES = (Family("SeedOssForCausalLM", spec_of),)
