"""The features of a model that the GPU runner does not support."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.spec import ModelSpec


def special_features(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the features of a spec that the GPU runner does not support."""
    names = spec.names
    has_later_norms = names.post_attention_norm is not None or names.post_mlp_norm is not None
    present = {
        "experts": spec.experts is not None,
        "norms after a parallel attention and MLP": has_later_norms and spec.parallel_residual,
        "layer norms after attention and MLP": has_later_norms and spec.norm == "layer",
    }
    return tuple(name for name, is_present in present.items() if is_present)
