"""What llama.cpp's converter stores otherwise than Hugging Face's files, as far as a spec says it."""

from __future__ import annotations

from dataclasses import replace

from penstock.gpu_node.model.architecture.recurrent import DeltaRule, Recurrence, StateSpace
from penstock.gpu_node.model.architecture.spec import LayerSpec, ModelSpec


def as_in_gguf(spec: ModelSpec) -> ModelSpec:
    """Return the spec of a model for the tensors of its GGUF file.

    The converter adds the offset to the weights of norms, writes rates of decay in place of their logarithms, and
    orders the value heads of a delta rule so that those of one key head lie apart.
    """
    made = {layer: _layer(layer) for layer in spec.kinds}
    return replace(spec, norm_offset=0.0, transposed=False, layers=tuple(made[layer] for layer in spec.layers))


def _layer(layer: LayerSpec) -> LayerSpec:
    return layer if layer.recurrence is None else replace(layer, recurrence=_mixer(layer.recurrence))


def _mixer(mixer: Recurrence) -> Recurrence:
    if isinstance(mixer, DeltaRule):
        return replace(mixer, has_rates=True, tiles_values=True)
    return replace(mixer, has_rates=True) if isinstance(mixer, StateSpace) else mixer
