"""Phi-3 and Phi-4: Llama with one tensor for queries, keys and values and one for gate and up, and with LongRoPE."""

from __future__ import annotations

from dataclasses import replace

from penstock.gpu_node.model.architecture.hf_config import (
    ATTENTION,
    LAYER,
    LLAMA_NAMES,
    Config,
    head_dim_of,
    llama_shapes,
    max_position_of,
    rope_of,
)
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec

_NAMES = replace(LLAMA_NAMES, qkv=(ATTENTION + "qkv_proj",), mlp_in=(LAYER + "mlp.gate_up_proj",))


def _spec_of(config: Config) -> ModelSpec:
    config = {"rms_norm_eps": 1e-5, **config}
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor")
    if share is None:
        share = config.get("partial_rotary_factor", 1.0)
    rope = rope_of(config, int(head_dim_of(config) * share))
    plain = {**config, "rope_parameters": None, "rope_scaling": None}
    shapes = llama_shapes(plain) | {"names": _NAMES, "rope": rope, "max_position": max_position_of(config, rope)}
    return ModelSpec(
        **shapes,
        windows=(config.get("sliding_window"),) * config["num_hidden_layers"],
        qkv_by_head=False,
        fused_gate=True,
    )


FAMILIES = (Family("Phi3ForCausalLM", _spec_of),)
