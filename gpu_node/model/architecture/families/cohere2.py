"""Cohere 2 (Command R7B, Command A): parallel layers, norms without biases, and no positions without a window."""

from __future__ import annotations

from typing import Any

from penstock.gpu_node.model.architecture.hf_config import (
    Config,
    biased_attention,
    layers_of,
    llama_layer,
    llama_mlp,
    llama_model,
    windows_of_kinds,
)
from penstock.gpu_node.model.architecture.spec import Family, LayerSpec, ModelSpec

_DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
}
"""transformers' own."""
_DEFAULT_PERIOD = 4


def _spec_of(config: Config) -> ModelSpec:
    config = {**_DEFAULTS, **config}

    def layer(window: int | None) -> LayerSpec:
        positions: dict[str, Any] = {"interleaved": True} if window is not None else {"rope": None}
        attention = biased_attention(config, window=window, **positions)
        return llama_layer(attention, llama_mlp(config), parallel_residual=True, mlp_norm=None)

    windows = windows_of_kinds(config, period=config.get("sliding_window_pattern", _DEFAULT_PERIOD))
    return llama_model(
        config,
        layers_of(config, windows, layer),
        norm="layer",
        norm_bias=False,
        norm_eps=config["layer_norm_eps"],
        logit_scale=config["logit_scale"],
    )


FAMILIES = (Family("Cohere2ForCausalLM", _spec_of),)
