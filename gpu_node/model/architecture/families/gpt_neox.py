"""GPT-NeoX and Pythia: layer norms, biases, an MLP without a gate in parallel with attention, and partial RoPE."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import Config, activation_of, head_dim_of, max_position_of, rope_of
from penstock.gpu_node.model.architecture.mlp import Mlp
from penstock.gpu_node.model.architecture.spec import Attention, Family, LayerSpec, ModelSpec

_DEFAULT_ROTARY_SHARE = 0.25
_LAYER = "gpt_neox.layers.{layer}."


def _spec_of(config: Config) -> ModelSpec:
    head_dim, attention_bias = head_dim_of(config), bool(config.get("attention_bias", True))
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor")
    if share is None:
        share = config.get("rotary_pct", _DEFAULT_ROTARY_SHARE)
    rope = rope_of(config, int(head_dim * share), theta=config.get("rotary_emb_base", 10_000.0))
    attention = Attention(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_attention_heads"],
        head_dim=head_dim,
        rope=rope,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        qkv=(_LAYER + "attention.query_key_value",),
        out=_LAYER + "attention.dense",
    )
    mlp = Mlp(
        intermediate_size=config["intermediate_size"],
        activation=activation_of(config, "hidden_act", "gelu"),
        bias=True,
        mlp_in=(_LAYER + "mlp.dense_h_to_4h",),
        mlp_out=_LAYER + "mlp.dense_4h_to_h",
    )
    layer = LayerSpec(
        attention=attention,
        mlp=mlp,
        parallel_residual=bool(config.get("use_parallel_residual", True)),
        attention_norm=_LAYER + "input_layernorm",
        mlp_norm=_LAYER + "post_attention_layernorm",
    )
    return ModelSpec(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        layers=(layer,) * config["num_hidden_layers"],
        max_position=max_position_of(config, rope),
        norm="layer",
        norm_eps=config.get("layer_norm_eps", 1e-5),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
    )


FAMILIES = (Family("GPTNeoXForCausalLM", _spec_of),)
