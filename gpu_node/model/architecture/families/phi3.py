"""Phi-3 and Phi-4: Llama with one tensor for queries, keys and values and one for gate and up, and with LongRoPE."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import (
    ATTENTION,
    MLP,
    Config,
    head_dim_of,
    llama_attention,
    llama_layer,
    llama_mlp,
    llama_model,
    max_position_of,
    rope_of,
)
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec


def _spec_of(config: Config) -> ModelSpec:
    config = {"rms_norm_eps": 1e-5, **config}
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor")
    if share is None:
        share = config.get("partial_rotary_factor", 1.0)
    rope = rope_of(config, int(head_dim_of(config) * share))
    attention = llama_attention(
        config, rope=rope, window=config.get("sliding_window"), qkv=(ATTENTION + "qkv_proj",), qkv_by_head=False
    )
    layer = llama_layer(attention, llama_mlp(config, mlp_in=(MLP + "gate_up_proj",), fused_gate=True))
    layers = (layer,) * config["num_hidden_layers"]
    return llama_model(config, layers, max_position=max_position_of(config, rope))


FAMILIES = (Family("Phi3ForCausalLM", _spec_of),)
