"""Convert the config and tokenizer of a GGUF file to Hugging Face's format. The result is cached.

Further settings, RoPE scaling included, are read at each start under the names of config.json.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint import generation_config
from penstock.gpu_node.model.checkpoint.gguf_description import describe
from penstock.gpu_node.model.checkpoint.gguf_encoders import write_modules
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile, GgufHeader
from penstock.gpu_node.model.checkpoint.gguf_metadata import Metadata
from penstock.gpu_node.model.checkpoint.gguf_tokenizer import (
    BYTE_LEVEL,
    TOKENIZER_LISTS,
    check_special_ids,
    end_ids,
    name_of,
    named_templates,
)
from penstock.gpu_node.model.protocol import WrittenTokenizer
from penstock.runtime.reading import reading

_TEMPLATES = "additional_chat_templates"
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that only writing raises."""


def describe_gguf(file: GgufFile, folder: Path, progress: Callable[[str, float], None]) -> WrittenTokenizer:
    """Write the config and tokenizer of a file to a new `folder`. Return the tokenizer.

    Raises ConfigError for an unreadable file and a full disk.
    """
    progress("convert", 0.0)
    try:
        with reading(file.path, str(file.path)):
            header = file.header_with(TOKENIZER_LISTS)
            _check_tokenizer(file.path, header)
            tokenizer = describe(header, folder)
            write_modules(file, Metadata(header), folder)
            _add_generation(header, folder / generation_config.FILE)
            for name, template in named_templates(header.metadata).items():
                (folder / _TEMPLATES).mkdir(exist_ok=True)
                (folder / _TEMPLATES / f"{name}.jinja").write_text(template, encoding="utf-8")
    except ConfigError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in _WRITING:
            raise ConfigError(f"cannot write to {folder}: {error.__cause__}") from error
        raise
    progress("convert", 1.0)
    return tokenizer


def _check_tokenizer(path: Path, header: GgufHeader) -> None:
    """Refuse a tokenizer whose way to split words is not known, which would give other tokens without a word."""
    merges = header.metadata.get(TOKENIZER_LISTS[2]) or ()
    try:
        wrong = next((merge for merge in merges if not isinstance(merge, str) or merge.count(" ") != 1), None)
        if wrong is not None:
            raise ConfigError(f"tokenizer.ggml.merges has {str(wrong)[:200]!r}; a merge is two tokens and a space")
        check_special_ids(header.metadata)
        if header.metadata.get("tokenizer.ggml.model") == BYTE_LEVEL:
            name_of(header.metadata)
    except ConfigError as error:
        raise ConfigError(f"cannot read {path}: {error.message}") from error


def _add_generation(header: GgufHeader, path: Path) -> None:
    """Add the sampling that the file recommends, and all tokens that end an answer, to its generation_config.json."""
    found = {name: header.metadata[key] for key, name in generation_config.FROM_GGUF.items() if key in header.metadata}
    given = json.loads(path.read_text(encoding="utf-8"))
    ends = {"eos_token_id": end_ids(header.metadata)}
    path.write_text(json.dumps(given | found | ends, indent=2) + "\n", encoding="utf-8")


_QWEN3_MOE = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}
_GEMMA3 = {"attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping"}
_SETTINGS = {
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.sliding_window": "sliding_window",
    },
    **dict.fromkeys(("gemma3", "gemma4"), _GEMMA3),
    "cohere2": {"attention.sliding_window": "sliding_window", "logit_scale": "logit_scale"},
    "gpt-oss": {
        "attention.key_length": "head_dim",
        "attention.sliding_window": "sliding_window",
        "expert_feed_forward_length": "intermediate_size",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
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
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), _QWEN3_MOE),
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
    scaling = rope_scaling(file)
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
    for field in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
        if found.get(field) == 0:
            found[field] = None  # llama.cpp takes 0 for no limit.
    if config.get("num_hidden_layers") == _LAYERS_OF_27B.get(name, 0):
        found["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    elif name in _LAYERS_OF_27B:
        found["query_pre_attn_scalar"] = config["head_dim"]
    if name == "phi3":
        found |= _partial_rotation(metadata, config)
    if name == "gpt-oss":
        found["attention_bias"] = True
    # Like llama.cpp.
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


def rope_scaling(file: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json's `rope_parameters` that scale RoPE; empty if it is not scaled."""
    header = file.header

    def values(name: str) -> list[float] | None:
        tensor = header.tensors.get(name)
        if tensor is None or tensor.ggml_type != "f32":
            return None
        numbers: list[float] = file.bytes_of(tensor).view(np.float32).tolist()
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
    if header.metadata.get("general.architecture") == "gpt-oss":
        found["truncate"] = False  # All models of this family were trained so, and the file does not say it.
    return found if found.get("rope_type", "none") != "none" else {}
