"""Read the config.json of a Hugging Face decoder into the parts of a spec."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import log, sqrt
from typing import Any, TypeVar

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.mlp import Activation, Mlp
from penstock.gpu_node.model.architecture.rope import (
    DynamicScaling,
    FactorsScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Rope,
    Scaling,
    YarnScaling,
)
from penstock.gpu_node.model.architecture.spec import Attention, LayerSpec, ModelSpec

Config = Mapping[str, Any]

_SCALINGS = "default, linear, dynamic, llama3, yarn, longrope, proportional"
_UNSCALED = ("default", "mrope")
"""The second divides channels among the axes of images. All axes of a text have the same positions."""
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu2": "relu2",
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
    if kind in _UNSCALED:
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
    if kind == "proportional":
        return ProportionalScaling(int(rope.get("partial_rotary_factor", 1.0) * dim // 2), float(rope.get("factor", 1)))
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


def kinds_of(
    config: Config,
    default: Callable[[int], str],
    supported: tuple[str, ...] = ("full_attention", "sliding_attention"),
    field: str = "layer_types",
) -> tuple[str, ...]:
    """Return the kind of each layer: `field`, or without it what `default` returns for the layer's index.

    Raises ConfigError that names the first layer of a kind that the family does not have.
    """
    kinds = config.get(field) or [default(layer) for layer in range(config["num_hidden_layers"])]
    if not isinstance(kinds, list | tuple):
        raise ConfigError(f"{field} is {str(kinds)[:80]!r} but must be a list with the kind of each layer")
    for layer, kind in enumerate(kinds):
        if kind not in supported:
            raise ConfigError(f"{field}[{layer}] is {kind!r}, but this family has only {', '.join(supported)}")
    return tuple(kinds)


def sliding_windows(config: Config) -> tuple[int | None, ...]:
    """Return the attention window of each layer, None for full attention.

    Without `use_sliding_window`, all layers have full attention.
    """
    num_layers: int = config["num_hidden_layers"]
    if not config.get("use_sliding_window"):
        return (None,) * num_layers
    window: int | None = config["sliding_window"]
    first = config.get("max_window_layers", num_layers)
    kinds = kinds_of(config, lambda layer: "sliding_attention" if layer >= first else "full_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


Kind = TypeVar("Kind", bound=Hashable)


def layers_of(
    config: Config, kinds: Sequence[Kind], layer_of: Callable[[Kind], LayerSpec], name: str = "layer_types"
) -> tuple[LayerSpec, ...]:
    """Return the layers of a model by their kinds; those of one kind are one record.

    name: the field that the kinds are from. Raises ConfigError unless there is a kind for each layer.
    """
    if len(kinds) != config["num_hidden_layers"]:
        raise ConfigError(f"{name} has {len(kinds)} entries for {config['num_hidden_layers']} layers")
    made = {kind: layer_of(kind) for kind in dict.fromkeys(kinds)}
    return tuple(made[kind] for kind in kinds)


def num_shared_experts(config: Config, shared_name: str, size_name: str) -> int:
    """Return how many experts the shared MLP is: its width ÷ that of an expert. Raises ConfigError for no multiple."""
    size, shared = config[size_name], config[shared_name]
    if not size or not shared or shared % size:
        raise ConfigError(f"{shared_name} is {shared} but must be a multiple of {size_name}, which is {size}")
    return int(shared // size)


def num_experts_of(config: Config) -> int:
    """Return the number of experts, which has two names. Raises ConfigError if it is absent or 0."""
    count: int | None = config.get("num_local_experts") or config.get("num_experts")
    if not count:
        raise ConfigError("num_local_experts (or num_experts) is missing; it must be at least 1")
    return count


_MODEL = "model."
LAYER = _MODEL + "layers.{layer}."
ATTENTION = LAYER + "self_attn."
MLP = LAYER + "mlp."
HEAD_NORMS: dict[str, Any] = {"q_norm": ATTENTION + "q_norm", "k_norm": ATTENTION + "k_norm"}
"""The norms of queries and keys in families that have them."""

# What follows is what Llama and the families derived from it read from a config in the same way. `changes` are fields
# that a family has otherwise.


def llama_attention(config: Config, **changes: Any) -> Attention:
    """Return the attention of Llama's layers."""
    num_heads, head_dim = config["num_attention_heads"], head_dim_of(config)
    fields: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "qkv": (ATTENTION + "q_proj", ATTENTION + "k_proj", ATTENTION + "v_proj"),
        "out": ATTENTION + "o_proj",
    }
    if "rope" not in changes:
        fields["rope"] = rope_of(config, head_dim)
    return Attention(**fields | changes)


def biased_attention(config: Config, **changes: Any) -> Attention:
    """Return Llama's attention, whose projections have biases if the config says so."""
    has_bias = bool(config.get("attention_bias"))
    return llama_attention(config, **{"qkv_bias": has_bias, "out_bias": has_bias} | changes)


def llama_mlp(config: Config, **changes: Any) -> Mlp:
    """Return the MLP of Llama's layers."""
    fields: dict[str, Any] = {
        "activation": activation_of(config, "hidden_act", "silu"),
        "mlp_in": (MLP + "gate_proj", MLP + "up_proj"),
        "mlp_out": MLP + "down_proj",
    }
    if "intermediate_size" not in changes:
        fields["intermediate_size"] = config["intermediate_size"]
    return Mlp(**fields | changes)


def llama_layer(attention: Attention | None, mlp: Mlp, **changes: Any) -> LayerSpec:
    """Return a layer of Llama."""
    norms = {"attention_norm": LAYER + "input_layernorm", "mlp_norm": LAYER + "post_attention_layernorm"}
    return LayerSpec(attention=attention, mlp=mlp, **norms | changes)


def llama_model(config: Config, layers: tuple[LayerSpec, ...], **changes: Any) -> ModelSpec:
    """Return a model of these layers."""
    fields: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "layers": layers,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tied_head": bool(config.get("tie_word_embeddings", False)),
        "embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
    }
    if "max_position" not in changes:
        fields["max_position"] = max_position_of(config, rope_of(config, head_dim_of(config)))
    return ModelSpec(**fields | changes)


def windows_of_kinds(config: Config, *, period: int) -> tuple[int | None, ...]:
    """Return the attention window of each layer by `layer_types`; without it, every `period`-th layer has none."""
    kinds = kinds_of(config, lambda layer: "sliding_attention" if (layer + 1) % period else "full_attention")
    window = config.get("sliding_window", 4096)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
