"""Read the RoPE scaling of a GGUF file, which transformers ignores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.files import mapped
from penstock.gpu_node.model.checkpoint.gguf_header import read_header

_FACTORS = "rope_freqs.weight"
"""The tensor of divisors, one per frequency, that the converter writes for Llama 3.1 and later."""
_FIELDS = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""GGUF's field names (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and those of config.json."""


def with_rope_scaling(config: dict[str, Any], gguf: Path) -> dict[str, Any]:
    """Return the config with the RoPE scaling of a GGUF file added. Raises ConfigError for an unreadable file."""
    content = np.frombuffer(mapped(gguf), np.uint8)
    try:
        header = read_header(content.data)
    except ConfigError as error:
        raise ConfigError(f"cannot read {gguf}: {error.message}") from error
    scaling = _scaling(header.metadata)
    factors = header.tensors.get(_FACTORS)
    if factors is not None and factors.ggml_type == "f32":
        data = content[factors.start : factors.start + factors.num_bytes]
        scaling = {"rope_type": "factors", "factors": data.view(np.float32).tolist()}
    return config | {"rope_parameters": (config.get("rope_parameters") or {}) | scaling} if scaling else config


def _scaling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{metadata.get('general.architecture')}.rope.scaling."
    found = {ours: metadata[prefix + theirs] for theirs, ours in _FIELDS.items() if prefix + theirs in metadata}
    return found if found.get("rope_type", "none") != "none" else {}
