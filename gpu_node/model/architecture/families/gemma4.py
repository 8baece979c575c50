"""The text models of Gemma 4: layers of two head sizes, shared keys, and embeddings of tokens for each layer.

26B-A4B has a mixture of experts beside the MLP of each layer.
"""

from __future__ import annotations

from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.hf_config import (
    ATTENTION,
    HEAD_NORMS,
    LAYER,
    Config,
    activation_of,
    biased_attention,
    kinds_of,
    llama_layer,
    llama_mlp,
    llama_model,
    rope_of,
)
from penstock.gpu_node.model.architecture.mlp import Activation, Experts, Mixture, Mlp
from penstock.gpu_node.model.architecture.spec import Attention, Family, LayerSpec, ModelSpec, TokenGate, TokenInputs

_FULL, _WINDOWED = "full_attention", "sliding_attention"
_PERIOD = 6
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "global_head_dim": 512,
}
"""transformers' own."""
_UNIFIED_DEFAULTS = _DEFAULTS | {
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_ROPES: dict[str, dict[str, Any]] = {
    _WINDOWED: {"rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_NORMS = {
    "post_attention_norm": LAYER + "post_attention_layernorm",
    "mlp_norm": LAYER + "pre_feedforward_layernorm",
    "post_mlp_norm": LAYER + "post_feedforward_layernorm",
    "output_scale": LAYER + "layer_scalar",
}


def _gemma4(config: Config) -> ModelSpec:
    return _spec_of({**_DEFAULTS, **config})


def _unified(config: Config) -> ModelSpec:
    return _spec_of({**_UNIFIED_DEFAULTS, **config})


def _spec_of(config: Config) -> ModelSpec:
    if config.get("use_bidirectional_attention") == "all":
        raise ConfigError("use_bidirectional_attention 'all' is not supported")
    kinds = list(kinds_of(config, lambda layer: _WINDOWED if (layer + 1) % _PERIOD else _FULL))
    kinds[-1] = _FULL
    num_own = config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    activation = activation_of(config, "hidden_activation", "gelu_pytorch_tanh")
    ropes = config.get("rope_parameters") or _ROPES
    gate, mixture = _token_gate(config, activation), _mixture(config, activation)
    made: dict[tuple[str, tuple[int, ...], int | None], LayerSpec] = {}

    def layer(at: int) -> LayerSpec:
        kind, heads = kinds[at], _heads_of(config, kinds[at], at)
        source = None if at < num_own else _source_of(kinds, at, num_own)
        if (key := (kind, tuple(heads.values()), source)) not in made:
            attention = _attention({**config, **heads}, kind, rope=ropes.get(kind) or _ROPES[kind], source=source)
            width = config["intermediate_size"] * (2 if source is not None and config.get("use_double_wide_mlp") else 1)
            mlp = llama_mlp(config, activation=activation, intermediate_size=width)
            made[key] = llama_layer(attention, mlp, mixture=mixture, token_gate=gate, **_NORMS)
        return made[key]

    return llama_model(
        config,
        tuple(map(layer, range(config["num_hidden_layers"]))),
        embedding_scale=config["hidden_size"] ** 0.5,
        logit_cap=config.get("final_logit_softcapping"),
        # The config states the length after scaling.
        max_position=int(config["max_position_embeddings"]),
        token_inputs=_token_inputs(config),
    )


def _heads_of(config: Config, kind: str, layer: int) -> dict[str, int]:
    """Return the sizes of a layer's heads. transformers 5 writes those that differ from the model's by layer.

    Layers have as many digits there as the last one has, such as 04.
    """
    heads = {name: config[name] for name in ("head_dim", "num_key_value_heads")}
    by_layer = config.get("per_layer_config")
    if isinstance(by_layer, dict):
        numbered = {name.lstrip("0"): own for name, own in by_layer.items()}
        own = numbered.get(str(layer).lstrip("0")) or by_layer.get(kind) or {}
        return heads | {name: own[name] for name in heads if name in own}
    if kind == _FULL:
        heads["head_dim"] = config["global_head_dim"]
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            heads["num_key_value_heads"] = config["num_global_key_value_heads"]
    return heads


def _source_of(kinds: list[str], layer: int, num_own: int) -> int:
    """Return the last layer with keys of its own that is of a layer's kind."""
    own = [at for at in range(max(0, num_own)) if kinds[at] == kinds[layer]]
    if not own:
        raise ConfigError(f"num_kv_shared_layers leaves no {kinds[layer]} layer with keys before layer {layer}")
    return own[-1]


def _attention(config: Config, kind: str, *, rope: Config, source: int | None) -> Attention:
    queries, keys, values = (f"{ATTENTION}{name}_proj" for name in "qkv")
    fields: dict[str, Any] = {"qkv": (queries, keys, values), "value_norm": True} | HEAD_NORMS
    if source is not None:
        fields = {"qkv": (queries,), "q_norm": HEAD_NORMS["q_norm"], "source": source}
    elif kind == _FULL and config.get("attention_k_eq_v"):
        # Values are the keys before their norm: the projection is there twice.
        fields["qkv"] = queries, keys, keys
    return biased_attention(
        config,
        rope=rope_of({"rope_parameters": rope}, config["head_dim"]),
        window=config["sliding_window"] if kind == _WINDOWED else None,
        score_scale=1.0,
        **fields,
    )


def _mixture(config: Config, activation: Activation) -> Mixture | None:
    if not config.get("enable_moe_block"):
        return None
    names = "num_experts", "top_k_experts", "moe_intermediate_size"
    if missing := [name for name in names if not config.get(name)]:
        raise ConfigError(f"enable_moe_block is true, but {' and '.join(missing)} must be at least 1")
    count, per_token, size = (config[name] for name in names)
    expert, router = LAYER + "experts.{expert}.", LAYER + "router."
    experts = Experts(
        count,
        per_token,
        normalized=True,
        router=router + "proj",
        router_norm=router + "scale",
        router_factor=config["hidden_size"] ** -0.5,
        factors=router + "per_expert_scale",
    )
    mlp = Mlp(
        intermediate_size=size,
        activation=activation,
        experts=experts,
        mlp_in=(expert + "gate_proj", expert + "up_proj"),
        mlp_out=expert + "down_proj",
    )
    return Mixture(
        mlp=mlp,
        norm=LAYER + "pre_feedforward_layernorm_2",
        output_norm=LAYER + "post_feedforward_layernorm_2",
        dense_norm=LAYER + "post_feedforward_layernorm_1",
    )


def _token_gate(config: Config, activation: Activation) -> TokenGate | None:
    if not config["hidden_size_per_layer_input"]:
        return None
    names = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
    return TokenGate(activation, *(LAYER + name for name in names))


def _token_inputs(config: Config) -> TokenInputs | None:
    if not (size := config["hidden_size_per_layer_input"]):
        return None
    return TokenInputs(
        size=size,
        vocab_size=config["vocab_size_per_layer_input"],
        scale=size**0.5,
        projection_scale=config["hidden_size"] ** -0.5,
        table="model.embed_tokens_per_layer",
        projection="model.per_layer_model_projection",
        norm="model.per_layer_projection_norm",
    )


FAMILIES = (
    Family("Gemma4ForCausalLM", _gemma4),
    Family("Gemma4ForConditionalGeneration", _gemma4, has_text_config=True),
    Family("Gemma4UnifiedForCausalLM", _unified),
    Family("Gemma4UnifiedForConditionalGeneration", _unified, has_text_config=True),
)
