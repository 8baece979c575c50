"""OLMo 2: norms after attention and MLP instead of before them, and norms over all heads of queries and of keys."""

from __future__ import annotations

from dataclasses import replace

from penstock.gpu_node.model.architecture.hf_config import HEAD_NORMS, LAYER, LLAMA_NAMES, Config, llama_shapes
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec

_NAMES = replace(
    LLAMA_NAMES,
    **HEAD_NORMS,
    attention_norm=None,
    post_attention_norm=LAYER + "post_attention_layernorm",
    mlp_norm=None,
    post_mlp_norm=LAYER + "post_feedforward_layernorm",
)


def _spec_of(config: Config) -> ModelSpec:
    attention_bias = bool(config.get("attention_bias"))
    return ModelSpec(
        **llama_shapes({"rms_norm_eps": 1e-5, **config}) | {"names": _NAMES},
        windows=(None,) * config["num_hidden_layers"],
        joint_head_norms=True,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
    )


FAMILIES = (Family("Olmo2ForCausalLM", _spec_of),)
