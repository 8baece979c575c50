"""Shapes of well-known models, as their `config.json` states them; for random weights (`load_format` dummy)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_QWEN3: dict[str, Any] = _LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-8b": _LLAMA | _sizes(4096, 14_336, 32, 32, 8, 128),
    "llama-3b": _LLAMA | {"tie_word_embeddings": True} | _sizes(3072, 8192, 28, 24, 8, 128),
    "llama-1b": _LLAMA | {"tie_word_embeddings": True} | _sizes(2048, 8192, 16, 32, 8, 64),
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16, 8, 128),
    "tiny": _LLAMA | {"vocab_size": 384, "max_position_embeddings": 2048} | _sizes(64, 128, 2, 4, 2, 16),
}
"""The names that `load_format` dummy accepts in place of a folder."""
