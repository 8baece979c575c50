"""The features of a model that not every runner supports."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.spec import ModelSpec


def special_features(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the features that a spec has beyond those of Llama, Qwen, Falcon and GPT-NeoX."""
    names = spec.names
    present = {
        "experts": spec.experts is not None,
        "norms after attention and MLP": names.post_attention_norm is not None or names.post_mlp_norm is not None,
        "attention without a norm before it": names.attention_norm is None,
        "norms over all heads": spec.joint_head_norms,
        "norm weights with an offset": spec.norm_offset != 0,
        "layers with different RoPE": len(set(spec.ropes)) > 1,
        "capped attention scores": spec.score_cap is not None,
        "capped logits": spec.logit_cap is not None,
        "scaled attention scores": spec.score_scale is not None,
        "scaled embeddings": spec.embedding_scale != 1,
        "scaled residuals": spec.residual_scale != 1,
        "scaled logits": spec.logit_scale != 1,
    }
    return tuple(name for name, is_present in present.items() if is_present)
