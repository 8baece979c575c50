"""Set the position tables of a native model. They follow from the spec and are not stored in checkpoints."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.spec import ModelSpec, Rope
from penstock.gpu_node.model.checkpoint.description import Description
from penstock.gpu_node.model.torch_common.positions import alibi_biases, write_rope_angles
from penstock.kernels.cpu.library import NativeModel, Vector

_CHUNK_TOKENS = 64
"""kChunk of src/attention/attention.h."""


def set_positions(model: NativeModel, described: Description) -> None:
    """Set each layer's attention window and RoPE, and the RoPE angles or the ALiBi score biases by position."""
    spec = described.spec
    tables = rope_tables(spec)
    for layer, (window, rope) in enumerate(zip(spec.windows, spec.ropes, strict=True)):
        model.set_layer_positions(layer, window or 0, -1 if rope is None else tables.index(rope))
    if spec.rope is None:
        num_positions = -(-described.max_model_len // _CHUNK_TOKENS) * _CHUNK_TOKENS
        model.set_vector(Vector.POSITION_BIASES, 0, alibi_biases(spec, num_positions))
    for i, rope in enumerate(tables):
        shape = described.max_model_len, rope.dim // 2
        write_rope_angles(rope, model.vector(Vector.COS, i, *shape), model.vector(Vector.SIN, i, *shape))


def rope_tables(spec: ModelSpec) -> list[Rope]:
    """Return the different RoPEs of a model's layers."""
    return list(dict.fromkeys(rope for rope in spec.ropes if rope is not None))
