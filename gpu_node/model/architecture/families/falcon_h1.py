"""Falcon-H1: in each layer attention and Mamba-2 side by side, with factors of what they read and return.

All factors are applied to the outputs of matrices, so that these keep the bits of the checkpoint. A factor of an input
is one of the outputs, and those of queries and keys are factors of scores.
"""

from __future__ import annotations

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.hf_config import (
    LAYER,
    Config,
    activation_of,
    head_dim_of,
    llama_attention,
    llama_model,
    max_position_of,
)
from penstock.gpu_node.model.architecture.mlp import Mlp
from penstock.gpu_node.model.architecture.recurrent import StateSpace
from penstock.gpu_node.model.architecture.spec import Family, LayerSpec, ModelSpec

_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_norm_before_gate": True,
}
_BIASES = ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias")
_MAMBA = LAYER + "mamba."
_MLP = LAYER + "feed_forward."
_NO_LIMITS = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
_NUM_MIXER_FACTORS, _NUM_MLP_FACTORS = 5, 2


def _computes(config: Config) -> bool:
    """Return whether the family computes a model: without biases, and with outputs that are gated before a norm."""
    norms_first = config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate", True)
    return not norms_first and not any(config.get(name) for name in _BIASES)


def _spec_of(config: Config) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    incoming = _factor(config, "attention_in_multiplier")
    attention = llama_attention(
        config,
        score_scale=incoming**2 * _factor(config, "key_multiplier") * head_dim_of(config) ** -0.5,
        output_factor=incoming * _factor(config, "attention_out_multiplier"),
    )
    gate_factor, mlp_factor = _factors(config, "mlp_multipliers", _NUM_MLP_FACTORS)
    mlp = Mlp(
        intermediate_size=config["intermediate_size"],
        activation=activation_of(config, "hidden_act", "silu"),
        gate_factor=gate_factor,
        output_factor=mlp_factor,
        mlp_in=(_MLP + "gate_proj", _MLP + "up_proj"),
        mlp_out=_MLP + "down_proj",
    )
    layer = LayerSpec(
        attention=attention,
        recurrence=_mixer(config),
        mlp=mlp,
        attention_norm=LAYER + "input_layernorm",
        mlp_norm=LAYER + "pre_ff_layernorm",
    )
    return llama_model(
        config,
        (layer,) * config["num_hidden_layers"],
        embedding_scale=_factor(config, "embedding_multiplier"),
        logit_scale=_factor(config, "lm_head_multiplier"),
        norm_eps=config["rms_norm_eps"],
        max_position=max_position_of(config, attention.rope),
        final_norm="model.final_layernorm",
    )


def _mixer(config: Config) -> StateSpace:
    limit = config.get("time_step_limit")
    if limit not in _NO_LIMITS:
        raise ConfigError(f"time_step_limit is {limit!r}, but only durations without limits are supported")
    heads, size = config["mamba_n_heads"], config["mamba_d_head"]
    width = config["mamba_d_ssm"] or config["mamba_expand"] * config["hidden_size"]
    head_dim = width // heads if size in (None, "auto") else size
    if head_dim * heads != width:
        raise ConfigError(f"mamba_d_head {head_dim} times mamba_n_heads {heads} must be mamba_d_ssm, {width}")
    incoming = _factor(config, "ssm_in_multiplier")
    gates, values, writes, reads, durations = _factors(config, "ssm_multipliers", _NUM_MIXER_FACTORS)
    return StateSpace(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=config["mamba_n_groups"],
        state_size=config["mamba_d_state"],
        taps=config["mamba_d_conv"],
        norm_eps=config["rms_norm_eps"],
        has_bias=False,
        has_convolution_bias=bool(config["mamba_conv_bias"]),
        inputs=_MAMBA + "in_proj",
        convolution=_MAMBA + "conv1d",
        duration_bias=_MAMBA + "dt_bias",
        decay_log=_MAMBA + "A_log",
        skip=_MAMBA + "D",
        norm=_MAMBA + "norm" if config.get("mamba_rms_norm") else None,
        out=_MAMBA + "out_proj",
        input_factors=(incoming * gates, incoming * values, incoming * writes, incoming * reads, incoming * durations),
        output_factor=_factor(config, "ssm_out_multiplier"),
    )


def _factor(config: Config, name: str) -> float:
    value = config.get(name)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is {str(value)[:80]!r} but must be a number")
    return float(value)


def _factors(config: Config, name: str, count: int) -> list[float]:
    values = config.get(name)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise ConfigError(f"{name} is {str(values)[:80]!r} but must have {count} numbers")
    return [_factor({name: value}, name) for value in values]


FAMILIES = (Family("FalconH1ForCausalLM", _spec_of, is_for=_computes),)
