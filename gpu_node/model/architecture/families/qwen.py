"""Qwen 2, 2.5 and 3: Llama with biases in the projections of attention, or with norms of each head's queries and keys.

Qwen 3 has a mixture of experts in every layer, in some of them, or in none. The text models of Qwen-VL are the same.
"""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import (
    HEAD_NORMS,
    MLP,
    Config,
    biased_attention,
    layers_of,
    llama_attention,
    llama_layer,
    llama_mlp,
    llama_model,
    num_experts_of,
    sliding_windows,
)
from penstock.gpu_node.model.architecture.mlp import Experts
from penstock.gpu_node.model.architecture.spec import Family, LayerSpec, ModelSpec

_QWEN3_HEAD_DIM = 128
_EXPERT = MLP + "experts.{expert}."


def _qwen2(config: Config) -> ModelSpec:
    def layer(window: int | None) -> LayerSpec:
        return llama_layer(llama_attention(config, window=window, qkv_bias=True), llama_mlp(config))

    return llama_model(config, layers_of(config, sliding_windows(config), layer))


def _qwen3(config: Config) -> ModelSpec:
    config = {"head_dim": _QWEN3_HEAD_DIM, **config}

    def layer(window: int | None) -> LayerSpec:
        return llama_layer(biased_attention(config, window=window, **HEAD_NORMS), llama_mlp(config))

    return llama_model(config, layers_of(config, sliding_windows(config), layer))


def _qwen3_moe(config: Config) -> ModelSpec:
    mixture = llama_mlp(
        config,
        intermediate_size=config["moe_intermediate_size"],
        experts=Experts(
            num_experts_of(config),
            config["num_experts_per_tok"],
            normalized=bool(config.get("norm_topk_prob")),
            router=MLP + "gate",
        ),
        mlp_in=(_EXPERT + "gate_proj", _EXPERT + "up_proj"),
        mlp_out=_EXPERT + "down_proj",
    )
    windows, step = sliding_windows(config), config.get("decoder_sparse_step") or 1
    dense = set(config.get("mlp_only_layers") or ())
    kinds = [(window, at not in dense and (at + 1) % step == 0) for at, window in enumerate(windows)]

    def layer(kind: tuple[int | None, bool]) -> LayerSpec:
        window, has_experts = kind
        attention = biased_attention(config, window=window, **HEAD_NORMS)
        return llama_layer(attention, mixture if has_experts else llama_mlp(config))

    return llama_model(config, layers_of(config, kinds, layer))


def _qwen3_vl_moe(config: Config) -> ModelSpec:
    """Return the text model of Qwen3-VL with experts, which always divides their weights by the sum."""
    return _qwen3_moe({**config, "norm_topk_prob": True})


FAMILIES = (
    Family("Qwen2ForCausalLM", _qwen2),
    Family("Qwen3ForCausalLM", _qwen3),
    Family("Qwen3MoeForCausalLM", _qwen3_moe),
    Family("Qwen2VLForConditionalGeneration", _qwen2, has_text_config=True),
    Family("Qwen2_5_VLForConditionalGeneration", _qwen2, has_text_config=True),
    Family("Qwen3VLForConditionalGeneration", _qwen3, has_text_config=True),
    Family("Qwen3VLMoeForConditionalGeneration", _qwen3_vl_moe, has_text_config=True),
)
