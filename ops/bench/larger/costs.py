"""What a larger model's token and prompt cost, from its shape and files: bytes that are read, operations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.larger.contestants import LARGER, bits_of
from bench.larger.models import MODEL_SHAPES, num_weights
from bench.workload import NUM_PROMPT_TOKENS, WORKLOADS
from penstock.gpu_node.model.checkpoint.dummy import SHAPES

_MEAN = 0.5


def decode_bytes(name: str, shape: str, weights: Path) -> float:
    """Bytes that an engine must read for a token of the single stream: all weights and the KV cache of its context."""
    config = SHAPES[MODEL_SHAPES[shape]]
    [request, *_] = WORKLOADS[f"larger-{shape}"]().requests
    context = len(request.prompt) + request.num_output * _MEAN
    kv_values: int = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    kv_bytes = 1 if LARGER[name].options.get("kv_cache_dtype") == "int8" else 2
    return _weight_bytes(name, config, weights) + context * kv_values * kv_bytes


def _weight_bytes(name: str, config: Mapping[str, Any], weights: Path) -> float:
    if weights.is_file():
        from gguf import GGUFReader

        return float(sum(tensor.n_bytes for tensor in GGUFReader(weights).tensors))
    return num_weights(config) * bits_of(name) / 8


def prompt_operations(shape: str) -> float:
    """Operations of the long prompt: of the products with weights and of the attention, the head for one row."""
    config = SHAPES[MODEL_SHAPES[shape]]
    head = config["vocab_size"] * config["hidden_size"]
    width = config["num_attention_heads"] * config["head_dim"]
    # Scores and weighted values, each over half of the pairs of tokens.
    attention = 2 * 2 * NUM_PROMPT_TOKENS**2 * _MEAN * width * config["num_hidden_layers"]
    return float(2 * (num_weights(config) - head) * NUM_PROMPT_TOKENS + 2 * head + attention)
