"""Checks of the numbers in a spec's records, with the names that a reader of config.json knows."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from penstock.contract.errors import ConfigError

IN_FILES = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads (num_kv_heads)",
    "head_dim": "head_dim (without it hidden_size / num_attention_heads)",
    "max_position": "max_position_embeddings (times the factor of RoPE scaling)",
    "norm_eps": "rms_norm_eps (layer_norm_eps, layer_norm_epsilon)",
    "score_scale": "attention_multiplier (query_pre_attn_scalar)",
    "score_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "limit": "swiglu_limit",
    "slope": "swiglu_alpha",
    "beta": "llama_4_scaling_beta",
    "gate_factor": "mlp_multipliers[0]",
    "output_factor": "mlp_multipliers[1] (attention_out_multiplier)",
    "length": "original_max_position_embeddings",
}
"""What fields of a spec are called in config.json, for a reader of an error."""


def check_sizes(record: Any) -> None:
    """Check that all fields of a record with the type int are at least 1. Raises ConfigError."""
    for field in fields(record):
        size = getattr(record, field.name)
        if field.type == "int" and (not isinstance(size, int) or size < 1):
            name = IN_FILES.get(field.name, field.name)
            raise ConfigError(f"{name} is {size!r} but must be a whole number of at least 1")


def check_factors(record: Any, *names: str) -> None:
    """Check that fields of a record are None or finite numbers above 0. Raises ConfigError."""
    for name in names:
        value = getattr(record, name)
        if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise ConfigError(f"{IN_FILES.get(name, name)} is {value!r} but must be a finite number above 0")
