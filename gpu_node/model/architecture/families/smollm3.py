"""SmolLM3: Llama in which every fourth layer has no positions."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import (
    Config,
    biased_attention,
    layers_of,
    llama_layer,
    llama_mlp,
    llama_model,
    sliding_windows,
)
from penstock.gpu_node.model.architecture.spec import Family, LayerSpec, ModelSpec

_DEFAULT_THETA = 2_000_000.0
_DEFAULT_INTERVAL = 4


def _spec_of(config: Config) -> ModelSpec:
    config = {"rope_theta": _DEFAULT_THETA, "tie_word_embeddings": True, **config}
    has_rope = _has_rope(config)
    kinds = ["full_attention" if rope else "sliding_attention" for rope in has_rope]
    windows = sliding_windows({**config, "layer_types": config.get("layer_types") or kinds})

    def layer(kind: tuple[int | None, bool]) -> LayerSpec:
        window, rotates = kind
        no_rope = {} if rotates else {"rope": None}
        attention = biased_attention(config, window=window, **no_rope)
        return llama_layer(attention, llama_mlp(config, bias=bool(config.get("mlp_bias"))))

    both = list(zip(windows, has_rope, strict=False))
    return llama_model(config, layers_of(config, both, layer, "layer_types or no_rope_layers"))


def _has_rope(config: Config) -> list[bool]:
    """Return whether each layer has RoPE; the config's `no_rope_layers` is 0 for a layer without it."""
    flags = config.get("no_rope_layers")
    if flags:
        return [bool(flag) for flag in flags]
    interval = config.get("no_rope_layer_interval", _DEFAULT_INTERVAL)
    return [(layer + 1) % interval != 0 for layer in range(config["num_hidden_layers"])]


FAMILIES = (Family("SmolLM3ForCausalLM", _spec_of),)
