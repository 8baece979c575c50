"""SmolLM3: Llama in which every fourth layer has no positions."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import Config, llama_shapes, sliding_windows
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec

_DEFAULT_THETA = 2_000_000.0
_DEFAULT_INTERVAL = 4


def _spec_of(config: Config) -> ModelSpec:
    shapes = llama_shapes({"rope_theta": _DEFAULT_THETA, "tie_word_embeddings": True, **config})
    attention_bias, has_rope = bool(config.get("attention_bias")), _has_rope(config)
    kinds = ["full_attention" if rope else "sliding_attention" for rope in has_rope]
    return ModelSpec(
        **shapes,
        windows=sliding_windows({**config, "layer_types": config.get("layer_types") or kinds}),
        layer_ropes=tuple(shapes["rope"] if rope else None for rope in has_rope),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias")),
    )


def _has_rope(config: Config) -> list[bool]:
    """Return whether each layer has RoPE; the config's `no_rope_layers` is 0 for a layer without it."""
    flags = config.get("no_rope_layers")
    if flags:
        return [bool(flag) for flag in flags]
    interval = config.get("no_rope_layer_interval", _DEFAULT_INTERVAL)
    return [(layer + 1) % interval != 0 for layer in range(config["num_hidden_layers"])]


FAMILIES = (Family("SmolLM3ForCausalLM", _spec_of),)
