"""GPT-2: a learned vector for each position, layer norms, and matrices that are stored transposed."""

from __future__ import annotations

from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.hf_config import Config, activation_of
from penstock.gpu_node.model.architecture.mlp import Mlp
from penstock.gpu_node.model.architecture.spec import Attention, Family, LayerSpec, ModelSpec

_LAYER = "transformer.h.{layer}."
_DEFAULTS: dict[str, Any] = {"vocab_size": 50_257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
"""transformers' own."""


def _spec_of(config: Config) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    if config.get("add_cross_attention"):
        raise ConfigError("add_cross_attention is not supported")
    hidden, num_heads = config["n_embd"], config["n_head"]
    if hidden % num_heads:
        raise ConfigError(f"n_embd is {hidden} but must be a multiple of n_head, which is {num_heads}")
    mlp = Mlp(
        intermediate_size=config.get("n_inner") or 4 * hidden,
        activation=activation_of(config, "activation_function", "gelu_new"),
        bias=True,
        mlp_in=(_LAYER + "mlp.c_fc",),
        mlp_out=_LAYER + "mlp.c_proj",
    )

    def layer(score_scale: float) -> LayerSpec:
        attention = Attention(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden // num_heads,
            rope=None,
            score_scale=score_scale,
            qkv_bias=True,
            out_bias=True,
            qkv=(_LAYER + "attn.c_attn",),
            qkv_by_head=False,
            out=_LAYER + "attn.c_proj",
        )
        return LayerSpec(attention=attention, mlp=mlp, attention_norm=_LAYER + "ln_1", mlp_norm=_LAYER + "ln_2")

    scale = (hidden // num_heads) ** -0.5 if config.get("scale_attn_weights", True) else 1.0
    by_layer = bool(config.get("scale_attn_by_inverse_layer_idx"))
    return ModelSpec(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        layers=tuple(layer(scale / (at + 1) if by_layer else scale) for at in range(config["n_layer"])),
        max_position=config["n_positions"],
        norm="layer",
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        transposed=True,
        tied_head=bool(config.get("tie_word_embeddings", True)),
        embedding="transformer.wte",
        position_embedding="transformer.wpe",
        final_norm="transformer.ln_f",
        head="lm_head",
    )


FAMILIES = (Family("GPT2LMHeadModel", _spec_of),)
