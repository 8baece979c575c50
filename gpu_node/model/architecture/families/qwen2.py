"""Qwen2 and Qwen2.5: Llama with biases in the query, key and value projections."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import Config, llama_shapes, sliding_windows
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec


def _spec_of(config: Config) -> ModelSpec:
    return ModelSpec(**llama_shapes(config), windows=sliding_windows(config), qkv_bias=True)


FAMILY = Family("Qwen2ForCausalLM", _spec_of)
