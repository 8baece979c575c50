"""Qwen3: Llama with RMS norms on each head's queries and keys."""

from __future__ import annotations

from dataclasses import replace

from penstock.gpu_node.model.architecture.hf_config import (
    HEAD_NORMS,
    LLAMA_NAMES,
    Config,
    llama_shapes,
    sliding_windows,
)
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec

_DEFAULT_HEAD_DIM = 128


def _spec_of(config: Config) -> ModelSpec:
    attention_bias = bool(config.get("attention_bias"))
    shapes = llama_shapes({"head_dim": _DEFAULT_HEAD_DIM, **config})
    shapes["names"] = replace(LLAMA_NAMES, **HEAD_NORMS)
    return ModelSpec(**shapes, windows=sliding_windows(config), qkv_bias=attention_bias, out_bias=attention_bias)


FAMILY = Family("Qwen3ForCausalLM", _spec_of)
