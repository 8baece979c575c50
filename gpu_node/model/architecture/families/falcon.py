"""Falcon in its three variants: 7B (one key head), 40B and 11B (groups of heads), and RW (ALiBi, sequential layers)."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import Config, activation_of, head_dim_of, max_position_of, rope_of
from penstock.gpu_node.model.architecture.mlp import Mlp
from penstock.gpu_node.model.architecture.spec import Attention, Family, LayerSpec, ModelSpec

_LAYER = "transformer.h.{layer}."
_NUM_NORMS_OF_NEW = 2


def _spec_of(config: Config) -> ModelSpec:
    is_new, has_bias = bool(config.get("new_decoder_architecture")), bool(config.get("bias"))
    is_parallel = is_new or bool(config.get("parallel_attn", True))
    attention = _attention_of(config, is_new=is_new, has_bias=has_bias)
    mlp = Mlp(
        intermediate_size=config.get("ffn_hidden_size") or 4 * config["hidden_size"],
        activation=activation_of(config, "activation", "gelu"),
        bias=has_bias,
        mlp_in=(_LAYER + "mlp.dense_h_to_4h",),
        mlp_out=_LAYER + "mlp.dense_4h_to_h",
    )
    attention_norm, mlp_norm = "input_layernorm", None if is_parallel else "post_attention_layernorm"
    num_norms = config.get("num_ln_in_parallel_attn") or _NUM_NORMS_OF_NEW
    if is_new and num_norms == _NUM_NORMS_OF_NEW:
        attention_norm, mlp_norm = "ln_attn", "ln_mlp"
    layer = LayerSpec(
        attention=attention,
        mlp=mlp,
        parallel_residual=is_parallel,
        attention_norm=_LAYER + attention_norm,
        mlp_norm=None if mlp_norm is None else _LAYER + mlp_norm,
    )
    return ModelSpec(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        layers=(layer,) * config["num_hidden_layers"],
        max_position=max_position_of(config, attention.rope),
        norm="layer",
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        tied_head=bool(config.get("tie_word_embeddings", True)),
        embedding="transformer.word_embeddings",
        final_norm="transformer.ln_f",
        head="lm_head",
    )


def _attention_of(config: Config, *, is_new: bool, has_bias: bool) -> Attention:
    head_dim, num_heads = head_dim_of(config), config["num_attention_heads"]
    num_kv_heads, has_alibi = int(num_heads), bool(config.get("alibi"))
    if is_new:
        num_kv_heads = int(config.get("num_kv_heads") or num_heads)
    elif config.get("multi_query", True):
        num_kv_heads = 1
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=None if has_alibi else rope_of(config, head_dim),
        has_position_biases=has_alibi,
        qkv_bias=has_bias,
        out_bias=has_bias,
        qkv=(_LAYER + "self_attention.query_key_value",),
        out=_LAYER + "self_attention.dense",
    )


FAMILIES = (Family("FalconForCausalLM", _spec_of),)
