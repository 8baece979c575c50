"""OLMo 2 and 3: norms after attention and MLP instead of before them, and norms over all heads of queries and of keys.

OLMo 3 has windows in three of four layers, whose positions are never scaled.
"""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import (
    HEAD_NORMS,
    LAYER,
    Config,
    biased_attention,
    head_dim_of,
    layers_of,
    llama_layer,
    llama_mlp,
    llama_model,
    max_position_of,
    rope_of,
    windows_of_kinds,
)
from penstock.gpu_node.model.architecture.spec import Family, LayerSpec, ModelSpec

_OLMO3_THETA = 500_000.0
_OLMO3_PERIOD = 4

NORMS = {
    "attention_norm": None,
    "post_attention_norm": LAYER + "post_attention_layernorm",
    "mlp_norm": None,
    "post_mlp_norm": LAYER + "post_feedforward_layernorm",
}


def _olmo2(config: Config) -> ModelSpec:
    config = {"rms_norm_eps": 1e-5, **config}
    attention = biased_attention(config, **HEAD_NORMS, joint_head_norms=True)
    layer = llama_layer(attention, llama_mlp(config), **NORMS)
    return llama_model(config, (layer,) * config["num_hidden_layers"])


def _olmo3(config: Config) -> ModelSpec:
    config = {"rms_norm_eps": 1e-5, **config}
    head_dim, theta = head_dim_of(config), config.get("rope_theta", _OLMO3_THETA)
    # transformers 5 writes the RoPE of each kind of layer into rope_parameters; before, all of it was for whole layers.
    by_kind = config.get("rope_parameters") or {}
    scaled = by_kind.get("full_attention", {} if "sliding_attention" in by_kind else by_kind)
    full = rope_of({**config, "rope_parameters": scaled}, head_dim, theta=theta)
    local = rope_of({"rope_parameters": by_kind.get("sliding_attention")}, head_dim, theta=theta)

    def layer(window: int | None) -> LayerSpec:
        rope = full if window is None else local
        attention = biased_attention(config, window=window, rope=rope, **HEAD_NORMS, joint_head_norms=True)
        return llama_layer(attention, llama_mlp(config), **NORMS)

    layers = layers_of(config, windows_of_kinds(config, period=_OLMO3_PERIOD), layer)
    return llama_model(config, layers, max_position=max_position_of(config, full))


FAMILIES = (Family("Olmo2ForCausalLM", _olmo2), Family("Olmo3ForCausalLM", _olmo3))
