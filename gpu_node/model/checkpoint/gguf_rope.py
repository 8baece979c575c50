"""Read the RoPE scaling of a GGUF file, which transformers ignores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.checkpoint.gguf_header import GgufHeader

_FACTORS = "rope_freqs.weight"
"""The tensor of divisors, one per frequency, that the converter writes for Llama 3.1 and later."""
_LONG_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""The tensors of divisors that the converter writes for LongRoPE."""
_FIELDS = {
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
    found = _fields(header.metadata)
    return found if found.get("rope_type", "none") != "none" else {}


def _fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{metadata.get('general.architecture')}.rope.scaling."
    return {ours: metadata[prefix + theirs] for theirs, ours in _FIELDS.items() if prefix + theirs in metadata}
