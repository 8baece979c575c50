"""Gemma 2 and Gemma 3 (text only): norms around attention and MLP, and a sliding window in most layers.

Gemma 2 caps scores and logits. Gemma 3 norms queries and keys instead, and has a RoPE of its own for windows.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.gpu_node.model.architecture.hf_config import HEAD_NORMS, Config, gemma_shapes, rope_of, windows_of_kinds
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec

_DEFAULT_SCORE_CAP = 50.0
_DEFAULT_LOGIT_CAP = 30.0
_DEFAULT_THETA = 1_000_000.0
_DEFAULT_LOCAL_THETA = 10_000.0
_DEFAULT_PERIOD = 6


def _gemma2(config: Config) -> ModelSpec:
    return ModelSpec(
        **gemma_shapes(config),
        windows=windows_of_kinds(config, period=2),
        score_cap=config.get("attn_logit_softcapping", _DEFAULT_SCORE_CAP),
        logit_cap=config.get("final_logit_softcapping", _DEFAULT_LOGIT_CAP),
    )


def _gemma3(config: Config) -> ModelSpec:
    # transformers 5 writes the RoPE of each kind of layer into rope_parameters.
    by_kind = config.get("rope_parameters") or {}
    settings = {"max_position_embeddings": 131_072, "rope_theta": _DEFAULT_THETA, **config}
    shapes = gemma_shapes({**settings, "rope_parameters": by_kind.get("full_attention", {})})
    full, head_dim = shapes["rope"], shapes["head_dim"]
    local_theta = config.get("rope_local_base_freq", _DEFAULT_LOCAL_THETA)
    local = rope_of({"rope_parameters": by_kind.get("sliding_attention")}, head_dim, theta=local_theta)
    windows = windows_of_kinds(config, period=config.get("sliding_window_pattern", _DEFAULT_PERIOD))
    return ModelSpec(
        **shapes | {"names": replace(shapes["names"], **HEAD_NORMS)},
        windows=windows,
        layer_ropes=tuple(full if window is None else local for window in windows),
        score_cap=config.get("attn_logit_softcapping"),
        logit_cap=config.get("final_logit_softcapping"),
    )


FAMILIES = (Family("Gemma2ForCausalLM", _gemma2), Family("Gemma3ForCausalLM", _gemma3))
