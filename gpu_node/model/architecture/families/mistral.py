"""Mistral: Llama with a sliding window in every layer, or in none."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import Config, llama_shapes
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec

_DEFAULT_WINDOW = 4096


def _spec_of(config: Config) -> ModelSpec:
    window = config.get("sliding_window", _DEFAULT_WINDOW)
    return ModelSpec(**llama_shapes(config), windows=(window,) * config["num_hidden_layers"])


FAMILY = Family("MistralForCausalLM", _spec_of)
