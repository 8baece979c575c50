"""Gemma 2: norms around attention and MLP, capped scores and logits, and a sliding window in every other layer."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.hf_config import Config, gemma_shapes, windows_of_kinds
from penstock.gpu_node.model.architecture.spec import Family, ModelSpec

_DEFAULT_SCORE_CAP = 50.0
_DEFAULT_LOGIT_CAP = 30.0


def _spec_of(config: Config) -> ModelSpec:
    return ModelSpec(
        **gemma_shapes(config),
        windows=windows_of_kinds(config, period=2),
        score_cap=config.get("attn_logit_softcapping", _DEFAULT_SCORE_CAP),
        logit_cap=config.get("final_logit_softcapping", _DEFAULT_LOGIT_CAP),
    )


FAMILY = Family("Gemma2ForCausalLM", _spec_of)
