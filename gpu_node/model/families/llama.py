"""Llama 1 to 3 and what is built alike (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.spec import Family, ModelSpec, NameMap, RopeScaling


def _spec_of(config: Mapping[str, Any]) -> ModelSpec:
    for flag in ("attention_bias", "mlp_bias"):
        if config.get(flag):
            raise ConfigError(f"LlamaForCausalLM with {flag} is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"LlamaForCausalLM with hidden_act {config['hidden_act']!r} is not supported: want 'silu'")
    num_heads = config["num_attention_heads"]
    # transformers 5 writes rope_parameters, checkpoints from before it rope_theta and rope_scaling.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return ModelSpec(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        rope_scaling=_rope_scaling(rope),
        max_position=config.get("max_position_embeddings", 2048),
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"rope scaling {kind!r} is not supported: want 'default' or 'llama3'")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=int(rope["original_max_position_embeddings"]),
    )


_LAYER = "model.layers.{layer}."

LLAMA = Family(
    architecture="LlamaForCausalLM",
    spec_of=_spec_of,
    names=NameMap(
        embedding="model.embed_tokens.weight",
        final_norm="model.norm.weight",
        head="lm_head.weight",
        attention_norm=_LAYER + "input_layernorm.weight",
        q=_LAYER + "self_attn.q_proj.weight",
        k=_LAYER + "self_attn.k_proj.weight",
        v=_LAYER + "self_attn.v_proj.weight",
        o=_LAYER + "self_attn.o_proj.weight",
        mlp_norm=_LAYER + "post_attention_layernorm.weight",
        gate=_LAYER + "mlp.gate_proj.weight",
        up=_LAYER + "mlp.up_proj.weight",
        down=_LAYER + "mlp.down_proj.weight",
    ),
)
