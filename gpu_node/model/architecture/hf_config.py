"""Read the config.json of a Hugging Face decoder into the parts of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log, sqrt
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import (
    Activation,
    DynamicScaling,
    FactorsScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    NameMap,
    Rope,
    Scaling,
    YarnScaling,
)

Config = Mapping[str, Any]

_SCALINGS = "default, linear, dynamic, llama3, yarn, longrope"
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
}


def activation_of(config: Config, field: str, default: str) -> Activation:
    """Return the activation that a config field names. Raises ConfigError for an unsupported one."""
    name = config.get(field, default)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(f"{field} {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def head_dim_of(config: Config) -> int:
    """Return the size of an attention head: `head_dim`, or else hidden_size / num_attention_heads."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope_of(config: Config, dim: int, *, theta: float = 10_000.0) -> Rope:
    """Return the rotary embedding over `dim` channels of a head; `theta` is the family's default."""
    # transformers 5 writes rope_parameters; earlier versions write rope_theta and rope_scaling.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return Rope(float(rope.get("rope_theta") or config.get("rope_theta") or theta), dim, _scaling_of(config, rope, dim))


def _scaling_of(config: Config, rope: Config, dim: int) -> Scaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(float(rope["factor"]))
    if kind == "dynamic":
        return DynamicScaling(float(rope["factor"]), int(config["max_position_embeddings"]))
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position=int(rope["original_max_position_embeddings"]),
        )
    if kind == "yarn":
        return _yarn_of(config, rope)
    if kind in ("longrope", "su"):
        return _long_of(config, rope, dim)
    if kind == "factors":
        if len(rope["factors"]) != dim // 2:
            raise ConfigError(f"rope scaling has {len(rope['factors'])} factors for {dim // 2} frequencies")
        return FactorsScaling(tuple(rope["factors"]))
    raise ConfigError(f"rope scaling {kind!r} is not supported; supported: {_SCALINGS}")


def _yarn_of(config: Config, rope: Config) -> YarnScaling:
    max_position = config["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings") or max_position
    factor = float(rope.get("factor") or max_position / original)
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        above, below = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
        if not (above and below):
            above, below = 1.0, 0.0
        magnitude = _yarn_magnitude(factor, above) / _yarn_magnitude(factor, below)
    return YarnScaling(
        factor=factor,
        original_max_position=int(original),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        magnitude=float(magnitude),
        whole_channels=bool(rope.get("truncate", True)),
    )


def _long_of(config: Config, rope: Config, dim: int) -> LongScaling:
    original = config.get("original_max_position_embeddings") or rope["original_max_position_embeddings"]
    for name in ("short_factor", "long_factor"):
        if len(rope[name]) != dim // 2:
            raise ConfigError(f"rope scaling has {len(rope[name])} {name} for {dim // 2} frequencies")
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        factor = rope.get("factor") or config["max_position_embeddings"] / original
        magnitude = sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0
    short, long = (tuple(map(float, rope[name])) for name in ("short_factor", "long_factor"))
    return LongScaling(short, long, int(original), float(magnitude))


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0


def max_position_of(config: Config, rope: Rope | None, default: int = 2048) -> int:
    """Return the number of tokens that a model can attend to.

    For linear, dynamic and YaRN scaling, the config states the length before scaling.
    """
    limit = int(config.get("max_position_embeddings", default))
    scaling = None if rope is None else rope.scaling
    if isinstance(scaling, YarnScaling):
        return int(scaling.original_max_position * scaling.factor)
    return int(limit * scaling.factor) if isinstance(scaling, LinearScaling | DynamicScaling) else limit


def sliding_windows(config: Config) -> tuple[int | None, ...]:
    """Return the attention window of each layer, None for full attention.

    Without `use_sliding_window`, all layers have full attention.
    """
    num_layers: int = config["num_hidden_layers"]
    if not config.get("use_sliding_window"):
        return (None,) * num_layers
    window: int | None = config["sliding_window"]
    first = config.get("max_window_layers", num_layers)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."

LLAMA_NAMES = NameMap(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_norm=LAYER + "input_layernorm",
    qkv=(ATTENTION + "q_proj", ATTENTION + "k_proj", ATTENTION + "v_proj"),
    out=ATTENTION + "o_proj",
    mlp_norm=LAYER + "post_attention_layernorm",
    mlp_in=(LAYER + "mlp.gate_proj", LAYER + "mlp.up_proj"),
    mlp_out=LAYER + "mlp.down_proj",
)
"""The tensor names of Llama and the families derived from it."""
HEAD_NORMS: dict[str, Any] = {"q_norm": ATTENTION + "q_norm", "k_norm": ATTENTION + "k_norm"}
"""The norms of queries and keys in families that have them."""


def llama_shapes(config: Config) -> dict[str, Any]:
    """Return the spec fields that Llama and the families derived from it read from a config in the same way."""
    num_heads, head_dim = config["num_attention_heads"], head_dim_of(config)
    rope = rope_of(config, head_dim)
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "max_position": max_position_of(config, rope),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope": rope,
        "activation": activation_of(config, "hidden_act", "silu"),
        "tied_head": bool(config.get("tie_word_embeddings", False)),
        "names": LLAMA_NAMES,
    }


def windows_of_kinds(config: Config, *, period: int) -> tuple[int | None, ...]:
    """Return the attention window of each layer by `layer_types`; without it, every `period`-th layer has none."""
    layers = range(config["num_hidden_layers"])
    kinds = config.get("layer_types") or [
        "sliding_attention" if (layer + 1) % period else "full_attention" for layer in layers
    ]
    window = config.get("sliding_window", 4096)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def gemma_shapes(config: Config) -> dict[str, Any]:
    """Return the spec fields that Gemma 2 and Gemma 3 read from a config in the same way."""
    if config.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention is not supported")
    attention_bias = bool(config.get("attention_bias"))
    names = replace(
        LLAMA_NAMES,
        post_attention_norm=LAYER + "post_attention_layernorm",
        mlp_norm=LAYER + "pre_feedforward_layernorm",
        post_mlp_norm=LAYER + "post_feedforward_layernorm",
    )
    shapes = llama_shapes({"head_dim": 256, "tie_word_embeddings": True, **config})
    return shapes | {
        "names": names,
        "norm_offset": 1.0,
        "activation": activation_of(config, "hidden_activation", "gelu_pytorch_tanh"),
        "score_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": config["hidden_size"] ** 0.5,
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
    }
