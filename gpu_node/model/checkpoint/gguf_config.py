"""Read the settings of a GGUF file that transformers ignores, RoPE scaling included, under the names of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.gguf_conversion import LLAMA_LIKE
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile
from penstock.gpu_node.model.checkpoint.gguf_header import GgufHeader

_SETTINGS = {
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.sliding_window": "sliding_window",
    },
    "gemma3": {"attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping"},
    "granite": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    "phi3": {
        "attention.sliding_window": "sliding_window",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    },
    "qwen3moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
    },
}
"""Architecture → its metadata keys, without the architecture's name, and the fields of config.json for them."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""These models scale scores by hidden_size / num_attention_heads instead of head_dim, which the file does not say."""


def with_gguf_settings(config: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Return the config with the settings of a GGUF file. Raises ConfigError for an unreadable file."""
    header = file.header
    try:
        config = config | _settings(header, config)
    except (KeyError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"cannot read {file.path}: its metadata is incomplete or invalid: {error!r}") from error
    scaling = rope_scaling(header, file.mapped.content)
    rope = config.get("rope_parameters") or {}
    if not scaling:
        return config
    if "full_attention" in rope:
        return config | {"rope_parameters": rope | {"full_attention": rope["full_attention"] | scaling}}
    return config | {"rope_parameters": rope | scaling}


def _settings(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    metadata = header.metadata
    name = str(metadata.get("general.architecture"))
    keys = {f"{name}.{key}": field for key, field in _SETTINGS.get(name, {}).items()}
    found = {field: metadata[key] for key, field in keys.items() if key in metadata}
    if "sliding_window" in found:
        found["sliding_window"] = found["sliding_window"] or None
    if config.get("num_hidden_layers") == _LAYERS_OF_27B.get(name, 0):
        found["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    elif name in _LAYERS_OF_27B:
        found["query_pre_attn_scalar"] = config["head_dim"]
    if name == "phi3":
        found |= _partial_rotation(metadata, config)
    if name in LLAMA_LIKE:
        found["architectures"] = [LLAMA_LIKE[name]]
        embedding = header.tensors.get("token_embd.weight")
        if embedding is not None:
            found["vocab_size"] = embedding.shape[0]
        found["tie_word_embeddings"] = "output.weight" not in header.tensors
    if name == "llama" and metadata.get("llama.expert_count"):
        found["architectures"] = ["MixtralForCausalLM"]
        found["num_local_experts"] = metadata["llama.expert_count"]
        found["num_experts_per_tok"] = metadata.get("llama.expert_used_count")
    return found


def _partial_rotation(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the share of a head's channels that RoPE rotates."""
    dim = metadata.get("phi3.rope.dimension_count")
    if not isinstance(dim, int):
        return {}
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    return {"rope_parameters": {**rope, "partial_rotary_factor": dim / head_dim}}


_FACTORS = "rope_freqs.weight"
"""The tensor of divisors, one per frequency, that the converter writes for Llama 3.1 and later."""
_LONG_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""The tensors of divisors that the converter writes for LongRoPE."""
_ROPE_FIELDS = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""GGUF's field names (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and those of config.json."""


def rope_scaling(header: GgufHeader, content: NDArray[np.uint8]) -> dict[str, Any]:
    """Return the fields of config.json's `rope_parameters` that scale RoPE; empty if it is not scaled.

    content: the bytes of the file.
    """

    def values(name: str) -> list[float] | None:
        tensor = header.tensors.get(name)
        if tensor is None or tensor.ggml_type != "f32":
            return None
        numbers: list[float] = content[tensor.start : tensor.start + tensor.num_bytes].view(np.float32).tolist()
        return numbers

    factors, long_factors = values(_FACTORS), {field: values(name) for field, name in _LONG_FACTORS.items()}
    if factors is not None:
        return {"rope_type": "factors", "factors": factors}
    if None not in long_factors.values():
        magnitude = header.metadata.get(f"{header.metadata.get('general.architecture')}.rope.scaling.attn_factor")
        return long_factors | {"rope_type": "longrope", "attention_factor": magnitude}
    prefix = f"{header.metadata.get('general.architecture')}.rope.scaling."
    keys = {prefix + theirs: ours for theirs, ours in _ROPE_FIELDS.items()}
    found = {ours: header.metadata[key] for key, ours in keys.items() if key in header.metadata}
    return found if found.get("rope_type", "none") != "none" else {}
