"""The names and row orders that llama.cpp's converter gives to the tensors of each architecture."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf.constants import MODEL_ARCH_NAMES
from gguf.tensor_mapping import get_tensor_name_map
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.gguf_header import GgufHeader

_INTERLEAVED_HEADS: dict[str, dict[str, str]] = {
    **{
        name: {".q_proj.": f"{name}.attention.head_count", ".k_proj.": f"{name}.attention.head_count_kv"}
        for name in ("llama", "granite", "smollm3")
    },
    **{name: {} for name in ("qwen2", "qwen3", "qwen3moe", "phi3", "olmo2", "gemma2", "gemma3")},
}
"""The supported GGUF architectures. For tensors with the two halves of each head interleaved: the part of the name
that selects them, and the metadata key with the number of heads."""


def conventions_of(header: GgufHeader) -> tuple[dict[str, int], Any]:
    """Return the number of heads of interleaved tensors by name part, and the map from Hugging Face's names."""
    name = str(header.metadata.get("general.architecture"))
    if name not in _INTERLEAVED_HEADS:
        raise ConfigError(f"architecture {name} is not supported in GGUF; supported: {', '.join(_INTERLEAVED_HEADS)}")
    architecture = next(known for known, gguf_name in MODEL_ARCH_NAMES.items() if gguf_name == name)
    counts = {suffix: _count(header, key) for suffix, key in _INTERLEAVED_HEADS[name].items()}
    return counts, get_tensor_name_map(architecture, _count(header, f"{name}.block_count"))


def _count(header: GgufHeader, key: str) -> int:
    count = header.metadata.get(key)
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"{key} of the metadata is {count!r} but must be a whole number of at least 1")
    return count


def deinterleaved(num_rows: int, num_heads: int) -> NDArray[np.int32]:
    """Return the row order that undoes the interleaving.

    Row r of a head's first half is stored as row 2r of the head, row r of its second half as row 2r + 1.
    """
    if num_rows % (2 * num_heads):
        raise ConfigError(f"{num_rows} rows do not divide into two halves for each of {num_heads} heads")
    return np.arange(num_rows, dtype=np.int32).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
