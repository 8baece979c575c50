"""What llama.cpp's converter stores otherwise than Hugging Face's files, as far as a spec says it."""

from __future__ import annotations

from dataclasses import replace

from penstock.gpu_node.model.architecture.mlp import Mlp
from penstock.gpu_node.model.architecture.recurrent import DeltaRule, Recurrence, StateSpace
from penstock.gpu_node.model.architecture.spec import LayerSpec, ModelSpec

_FACTORS = "the converter multiplies factors into the matrices, which adapters lack; serve the model's folder"
_FUSED = ".shared_mlp.input_linear"


def as_in_gguf(spec: ModelSpec) -> ModelSpec:
    """Return the spec of a model for the tensors of its GGUF file.

    The converter adds the offset to the weights of norms, and writes rates of decay in place of their logarithms. It
    splits tensors that hold several matrices. It orders the value heads of a delta rule so that those of one key head
    lie apart, unless it splits the tensor that has them. Gates and up projections of Gemma 4's experts stay in one
    tensor.
    """
    made = {layer: _layer(layer) for layer in spec.kinds}
    layers = tuple(made[layer] for layer in spec.layers)
    # Of Falcon-H1.
    reason = _FACTORS if any(layer.has_two_mixers for layer in spec.kinds) else ""
    return replace(spec, norm_offset=0.0, transposed=False, layers=layers, foreign_adapters=reason)


def _layer(layer: LayerSpec) -> LayerSpec:
    recurrence = None if layer.recurrence is None else _mixer(layer.recurrence)
    mixture = None if layer.mixture is None else replace(layer.mixture, mlp=_joined_gate(layer.mixture.mlp))
    return replace(layer, recurrence=recurrence, mlp=None if layer.mlp is None else _mlp(layer.mlp), mixture=mixture)


def _joined_gate(mlp: Mlp) -> Mlp:
    """Return the experts of Gemma 4, of which one tensor has gates and up projections, as in transformers."""
    gate, _ = mlp.mlp_in
    return replace(mlp, mlp_in=(gate.replace("gate_proj", "gate_up_proj"),), fused_gate=True)


def _mlp(mlp: Mlp) -> Mlp:
    if mlp.fused_gate and (parts := _split(mlp.mlp_in[0])) is not None:
        return replace(mlp, split_gate=parts)
    experts = mlp.experts
    if experts is None or experts.shared is None or (parts := _split(experts.shared.mlp_in[0])) is None:
        return mlp
    return replace(mlp, experts=replace(experts, shared=replace(experts.shared, mlp_in=parts)))


def _split(name: str) -> tuple[str, str] | None:
    """Return the names of gates and up projections of a shared MLP; None for a tensor that the converter keeps."""
    prefix, found, _ = name.partition(_FUSED)
    return (f"{prefix}.shared_mlp.gate_linear", f"{prefix}.shared_mlp.up_linear") if found else None


def _mixer(mixer: Recurrence) -> Recurrence:
    if isinstance(mixer, DeltaRule) and mixer.is_fused:
        name = mixer.inputs[0].removesuffix("qkvz")
        return replace(mixer, has_rates=True, split_inputs=(f"{name}qkv", f"{name}z"))
    if isinstance(mixer, DeltaRule):
        return replace(mixer, has_rates=True, tiles_values=True)
    return replace(mixer, has_rates=True) if isinstance(mixer, StateSpace) else mixer
