"""EXAONE 4: norms after attention and MLP, norms of each head, and no positions in the layers without a window."""

from __future__ import annotations

from typing import Any

from penstock.gpu_node.model.architecture.families.olmo2 import NORMS
from penstock.gpu_node.model.architecture.hf_config import (
    HEAD_NORMS,
    Config,
    layers_of,
    llama_attention,
    llama_layer,
    llama_mlp,
    llama_model,
    windows_of_kinds,
)
from penstock.gpu_node.model.architecture.spec import Family, LayerSpec, ModelSpec

_DEFAULT_WINDOW = 4096
_DEFAULT_PERIOD = 4


def _spec_of(config: Config) -> ModelSpec:
    config = {"rms_norm_eps": 1e-5, "sliding_window": _DEFAULT_WINDOW, **config}
    has_windows = config["sliding_window"] is not None
    pattern = config.get("sliding_window_pattern", _DEFAULT_PERIOD)
    # A text has a letter for each layer of a period: L for one with a window, G for one without.
    period = len(pattern) if isinstance(pattern, str) else pattern
    windows = windows_of_kinds(config, period=period) if has_windows else (None,) * config["num_hidden_layers"]

    def layer(window: int | None) -> LayerSpec:
        no_rope: dict[str, Any] = {"rope": None} if has_windows and window is None else {}
        return llama_layer(llama_attention(config, window=window, **no_rope, **HEAD_NORMS), llama_mlp(config), **NORMS)

    return llama_model(config, layers_of(config, windows, layer))


FAMILIES = (Family("Exaone4ForCausalLM", _spec_of),)
