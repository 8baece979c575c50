"""Gemma 2 and the text models of Gemma 3: norms around attention and MLP, and a sliding window in most layers.

Gemma 2 caps scores and logits. Gemma 3 norms queries and keys instead, and has a RoPE of its own for windows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.hf_config import (
    HEAD_NORMS,
    LAYER,
    Config,
    activation_of,
    biased_attention,
    head_dim_of,
    layers_of,
    llama_layer,
    llama_mlp,
    llama_model,
    rope_of,
    windows_of_kinds,
)
from penstock.gpu_node.model.architecture.spec import EncoderParts, Family, LayerSpec, ModelSpec

_DEFAULT_SCORE_CAP = 50.0
_DEFAULT_LOGIT_CAP = 30.0
_DEFAULT_THETA = 1_000_000.0
_DEFAULT_LOCAL_THETA = 10_000.0
_DEFAULT_PERIOD = 6
_MAX_POSITION = 131_072
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": _MAX_POSITION,
    "rope_theta": _DEFAULT_THETA,
}
"""Published models with an image encoder leave out what is as here."""
_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
_NORMS = {
    "post_attention_norm": LAYER + "post_attention_layernorm",
    "mlp_norm": LAYER + "pre_feedforward_layernorm",
    "post_mlp_norm": LAYER + "post_feedforward_layernorm",
}


def _gemma2(config: Config) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    cap = config.get("attn_logit_softcapping", _DEFAULT_SCORE_CAP)

    def layer(window: int | None) -> LayerSpec:
        return _layer(config, window=window, score_cap=cap)

    return _model(
        config,
        layers_of(config, windows_of_kinds(config, period=2), layer),
        logit_cap=config.get("final_logit_softcapping", _DEFAULT_LOGIT_CAP),
    )


def embedding_gemma_spec(config: Config) -> ModelSpec:
    """Return the spec of EmbeddingGemma: Gemma 3 whose tokens see later ones too, in most layers half a window away."""
    config = {**config, "use_bidirectional_attention": False}
    if (window := config.get("sliding_window")) is not None:
        # Half of it on each side, and the token itself.
        config["sliding_window"] = window // 2 + 1
    spec = _gemma3(config)
    return replace(spec, encoder=EncoderParts(embedding_norm=None, has_final_norm=True), tied_head=True, head="")


def _gemma3(config: Config) -> ModelSpec:
    # transformers 5 writes the RoPE of each kind of layer into rope_parameters.
    by_kind = config.get("rope_parameters") or {}
    config = {**_DEFAULTS, **_GEMMA3_DEFAULTS, **config, "rope_parameters": by_kind.get("full_attention", {})}
    head_dim, local_theta = head_dim_of(config), config.get("rope_local_base_freq", _DEFAULT_LOCAL_THETA)
    full = rope_of(config, head_dim)
    local = rope_of({"rope_parameters": by_kind.get("sliding_attention")}, head_dim, theta=local_theta)
    cap = config.get("attn_logit_softcapping")

    def layer(window: int | None) -> LayerSpec:
        rope = full if window is None else local
        return _layer(config, window=window, rope=rope, score_cap=cap, **HEAD_NORMS)

    windows = windows_of_kinds(config, period=config.get("sliding_window_pattern", _DEFAULT_PERIOD))
    return _model(
        config,
        layers_of(config, windows, layer),
        logit_cap=config.get("final_logit_softcapping"),
        # The config states the length after scaling.
        max_position=int(config["max_position_embeddings"]),
    )


def _layer(config: Config, **attention: Any) -> LayerSpec:
    if config.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention is not supported")
    scale = config.get("query_pre_attn_scalar", 256) ** -0.5
    mlp = llama_mlp(config, activation=activation_of(config, "hidden_activation", "gelu_pytorch_tanh"))
    return llama_layer(biased_attention(config, score_scale=scale, **attention), mlp, **_NORMS)


def _model(config: Config, layers: tuple[LayerSpec, ...], **changes: Any) -> ModelSpec:
    return llama_model(config, layers, norm_offset=1.0, embedding_scale=config["hidden_size"] ** 0.5, **changes)


FAMILIES = (
    Family("Gemma2ForCausalLM", _gemma2),
    Family("Gemma3ForCausalLM", _gemma3),
    Family("Gemma3ForConditionalGeneration", _gemma3, has_text_config=True),
)
