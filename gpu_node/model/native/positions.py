"""Set the position tables of a native model. They follow from the spec and are not stored in checkpoints."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.description import Description
from penstock.gpu_node.model.torch_common.positions import alibi_biases, rope_angles
from penstock.kernels.cpu.library import NativeModel, Vector

_CHUNK_TOKENS = 64
"""kChunk of src/attention/attention.h."""


def set_positions(model: NativeModel, described: Description) -> None:
    """Set each layer's attention window, and the RoPE angles or the ALiBi score biases by position."""
    spec = described.spec
    for layer, window in enumerate(spec.windows):
        model.set_window(layer, window or 0)
    if spec.rope is None:
        num_positions = -(-described.max_model_len // _CHUNK_TOKENS) * _CHUNK_TOKENS
        model.set_vector(Vector.POSITION_BIASES, 0, alibi_biases(spec, num_positions))
        return
    for vector, table in zip((Vector.COS, Vector.SIN), rope_angles(spec.rope, described.max_model_len), strict=True):
        model.set_vector(vector, 0, table)
