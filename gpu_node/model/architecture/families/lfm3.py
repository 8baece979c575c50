"""LFM3: short convolutions, attention with and without a window and with a gate of each head, and norms of outputs."""

from __future__ import annotations

from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.hf_config import (
    ATTENTION,
    HEAD_NORMS,
    LAYER,
    Config,
    biased_attention,
    kinds_of,
    layers_of,
    llama_model,
    rope_of,
)
from penstock.gpu_node.model.architecture.mlp import Mlp
from penstock.gpu_node.model.architecture.recurrent import ShortConvolution
from penstock.gpu_node.model.architecture.rope import Rope
from penstock.gpu_node.model.architecture.spec import Family, LayerSpec, ModelSpec

_DEFAULTS = {
    "vocab_size": 128_000,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "conv_L_cache": 7,
    "head_dim": 128,
    "sliding_window": 256,
    "use_sandwich_norm": True,
    "use_attention_gate": True,
}
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
_PERIOD = 4
_CONVOLUTION = LAYER + "conv."
_MLP = LAYER + "feed_forward."


def _spec_of(config: Config) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    norms: dict[str, Any] = {"attention_norm": LAYER + "operator_norm", "mlp_norm": LAYER + "ffn_norm"}
    if config["use_sandwich_norm"]:
        norms |= {"post_attention_norm": LAYER + "post_operator_norm", "post_mlp_norm": LAYER + "post_ffn_norm"}
    convolution = ShortConvolution(
        channels=config["hidden_size"],
        taps=config["conv_L_cache"],
        has_bias=bool(config.get("conv_bias")),
        has_convolution_bias=bool(config.get("conv_bias")),
        inputs=_CONVOLUTION + "in_proj",
        convolution=_CONVOLUTION + "conv",
        out=_CONVOLUTION + "out_proj",
    )
    mlp = Mlp(intermediate_size=config["intermediate_size"], mlp_in=(_MLP + "w1", _MLP + "w3"), mlp_out=_MLP + "w2")

    def layer(kind: str) -> LayerSpec:
        if kind == "conv":
            return LayerSpec(attention=None, recurrence=convolution, mlp=mlp, **norms)
        attention = biased_attention(
            config,
            rope=_rope_of(config, kind),
            window=config["sliding_window"] if kind == "sliding_attention" else None,
            head_gate=ATTENTION + "gate_proj" if config["use_attention_gate"] else None,
            **HEAD_NORMS,
        )
        return LayerSpec(attention=attention, mlp=mlp, **norms)

    return llama_model(
        config,
        layers_of(config, kinds_of(config, _default_kind, ("conv", *_ROPES)), layer),
        norm_eps=config["norm_eps"],
        max_position=config["max_position_embeddings"],
        final_norm="model.embedding_norm",
        tied_head=bool(config.get("tie_word_embeddings", True)),
    )


def _default_kind(layer: int) -> str:
    if layer % _PERIOD == _PERIOD // 2:
        return "full_attention"
    return "sliding_attention" if layer and layer % _PERIOD == 0 else "conv"


def _rope_of(config: Config, kind: str) -> Rope:
    ropes = config.get("rope_parameters") or _ROPES
    settings = ropes.get(kind) if isinstance(ropes, dict) else None
    if not isinstance(settings, dict):
        raise ConfigError(f"rope_parameters has {str(settings)[:80]!r} for layers of the kind {kind}")
    return rope_of({**config, "rope_parameters": settings}, config["head_dim"])


FAMILIES = (Family("Lfm3ForCausalLM", _spec_of),)
