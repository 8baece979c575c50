"""OLMo 2: norms after attention and MLP instead of before them, and norms over all heads of queries and of keys."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import (
    HEAD_NORMS,
    LAYER,
    Config,
    biased_attention,
    llama_layer,
    llama_mlp,
    llama_model,
)
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec

_NORMS = {
    "attention_norm": None,
    "post_attention_norm": LAYER + "post_attention_layernorm",
    "mlp_norm": None,
    "post_mlp_norm": LAYER + "post_feedforward_layernorm",
}


def _spec_of(config: Config) -> ModelSpec:
    config = {"rms_norm_eps": 1e-5, **config}
    attention = biased_attention(config, **HEAD_NORMS, joint_head_norms=True)
    layer = llama_layer(attention, llama_mlp(config), **_NORMS)
    return llama_model(config, (layer,) * config["num_hidden_layers"])


FAMILIES = (Family("Olmo2ForCausalLM", _spec_of),)
