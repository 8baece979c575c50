"""StableLM: Llama with layer norms, RoPE over a part of each head, and in some models attention and MLP in parallel."""

from __future__ import annotations

from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.hf_config import (
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

_DEFAULT_ROTARY_SHARE = 0.25


def _spec_of(config: Config) -> ModelSpec:
    if config.get("qk_layernorm"):
        raise ConfigError("qk_layernorm is not supported")
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor")
    if share is None:
        share = config.get("partial_rotary_factor", _DEFAULT_ROTARY_SHARE)
    rope = rope_of(config, int(head_dim_of(config) * share))
    attention = llama_attention(config, rope=rope, qkv_bias=bool(config.get("use_qkv_bias")))
    # In parallel, both read one norm.
    shared: dict[str, Any] = (
        {"parallel_residual": True, "mlp_norm": None} if config.get("use_parallel_residual") else {}
    )
    layers = (llama_layer(attention, llama_mlp(config), **shared),) * config["num_hidden_layers"]
    norm_eps = config.get("layer_norm_eps", 1e-5)
    return llama_model(
        config, layers, norm="layer", norm_eps=norm_eps, max_position=max_position_of(config, rope, 4096)
    )


FAMILIES = (Family("StableLmForCausalLM", _spec_of),)
