"""LFM2: short convolutions in most layers, and attention with norms of each head's queries and keys in the others."""

from __future__ import annotations

from typing import Any

from penstock.gpu_node.model.architecture.hf_config import (
    LAYER,
    Config,
    head_dim_of,
    kinds_of,
    layers_of,
    llama_attention,
    llama_model,
    max_position_of,
    num_experts_of,
    rope_of,
)
from penstock.gpu_node.model.architecture.mlp import Experts, Mlp
from penstock.gpu_node.model.architecture.recurrent import ShortConvolution
from penstock.gpu_node.model.architecture.spec import Family, LayerSpec, ModelSpec

_DEFAULTS = {
    "vocab_size": 65_536,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
_DEFAULT_THETA = 1_000_000.0
_ATTENTION = LAYER + "self_attn."
_CONVOLUTION = LAYER + "conv."
_MLP = LAYER + "feed_forward."
_EXPERT = _MLP + "experts.{expert}."
_MIXTURE_DEFAULTS = {
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts_per_tok": 4,
    "num_experts": 32,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_KINDS = ("conv", "full_attention")


def _lfm2(config: Config) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    mlp = _mlp(_intermediate_size(config))
    return _model(config, [mlp] * config["num_hidden_layers"])


def _lfm2_moe(config: Config) -> ModelSpec:
    config = {**_DEFAULTS, **_MIXTURE_DEFAULTS, **config}
    experts = Experts(
        num_experts_of(config),
        config["num_experts_per_tok"],
        normalized=bool(config["norm_topk_prob"]),
        router=_MLP + "gate",
        by_sigmoid=True,
        choice_bias=_MLP + "expert_bias" if config["use_expert_bias"] else None,
        scale=config["routed_scaling_factor"],
    )
    mixture = Mlp(
        intermediate_size=config["moe_intermediate_size"],
        experts=experts,
        mlp_in=(_EXPERT + "w1", _EXPERT + "w3"),
        mlp_out=_EXPERT + "w2",
    )
    dense, count = _mlp(config["intermediate_size"]), config["num_dense_layers"]
    return _model(config, [dense if at < count else mixture for at in range(config["num_hidden_layers"])])


def _model(config: Config, mlps: list[Mlp]) -> ModelSpec:
    rope = rope_of(config, head_dim_of(config), theta=_DEFAULT_THETA)
    attention = llama_attention(
        config,
        rope=rope,
        out=_ATTENTION + "out_proj",
        q_norm=_ATTENTION + "q_layernorm",
        k_norm=_ATTENTION + "k_layernorm",
    )
    convolution = ShortConvolution(
        channels=config["hidden_size"],
        taps=config["conv_L_cache"],
        has_bias=bool(config.get("conv_bias")),
        has_convolution_bias=bool(config.get("conv_bias")),
        inputs=_CONVOLUTION + "in_proj",
        convolution=_CONVOLUTION + "conv",
        out=_CONVOLUTION + "out_proj",
    )
    norms: dict[str, Any] = {"attention_norm": LAYER + "operator_norm", "mlp_norm": LAYER + "ffn_norm"}

    def layer(kind: tuple[str, Mlp]) -> LayerSpec:
        name, mlp = kind
        if name == "conv":
            return LayerSpec(attention=None, recurrence=convolution, mlp=mlp, **norms)
        return LayerSpec(attention=attention, mlp=mlp, **norms)

    with_attention = config.get("full_attn_idxs")
    names = kinds_of(
        config, lambda at: "full_attention" if with_attention is None or at in with_attention else "conv", _KINDS
    )
    return llama_model(
        config,
        layers_of(config, list(zip(names, mlps, strict=False)), layer),
        norm_eps=config["norm_eps"],
        max_position=max_position_of(config, rope),
        final_norm="model.embedding_norm",
        tied_head=bool(config.get("tie_embedding", config.get("tie_word_embeddings", True))),
    )


def _mlp(size: int) -> Mlp:
    return Mlp(intermediate_size=size, mlp_in=(_MLP + "w1", _MLP + "w3"), mlp_out=_MLP + "w2")


def _intermediate_size(config: Config) -> int:
    size = int(config.get("block_ff_dim") or config["intermediate_size"])
    if not config["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if config["block_ffn_dim_multiplier"] is not None:
        multiple = config["block_multiple_of"]
        size = -(-int(config["block_ffn_dim_multiplier"] * size) // multiple) * multiple
    return size


FAMILIES = (Family("Lfm2ForCausalLM", _lfm2), Family("Lfm2MoeForCausalLM", _lfm2_moe))
