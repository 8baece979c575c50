"""The choice of kernel format for each matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.checkpoint.files import Stored, StoredTensor
from penstock.gpu_node.model.checkpoint.gguf_blocks import block_kind, in_blocks
from penstock.kernels.cpu.formats import PANEL, STORED_FORMATS, Format, Run, Source

_FORMATS = {"none": Format.BF16, "int8": Format.INT8, "int8_group": Format.INT8_GROUP, "int4": Format.INT4_GROUP}
_OWN = {
    **dict.fromkeys(("bfloat16", "float16", "float32"), Format.BF16),
    "q4_1": Format.INT4_GROUP,
    "q8_0": Format.INT8_GROUP,
    **{weights.name.lower(): weights for weights in STORED_FORMATS},
}
"""The kernel format of each stored kind; float16 and float32 are rounded. Any other kind becomes grouped int8."""
_SOURCES = {source.name.lower(): source for source in Source}


def runs_of(parts: Sequence[Stored], quantization: str, *, interleaved: bool) -> list[Run]:
    """Return the format of the rows of each part of a matrix.

    With `auto`, each part keeps its own format, if they can stand beside each other. Otherwise the matrix has the most
    precise format of any part, or the format that was asked for. `interleaved`: the rows of the parts alternate.
    """
    num_rows = [part.shape[0] for part in parts]
    if quantization != "auto":
        return [(_FORMATS[quantization], sum(num_rows))]
    formats = [_OWN.get(block_kind(part), Format.INT8_GROUP) for part in parts]
    if len(set(formats)) == 1:
        return [(formats[0], sum(num_rows))]
    if Format.BF16 in formats:
        return [(Format.BF16, sum(num_rows))]
    if interleaved or any(count % PANEL for count in num_rows[:-1]):
        return [(Format.INT8_GROUP, sum(num_rows))]
    return list(zip(formats, num_rows, strict=True))


def keeps_bits(parts: Sequence[Stored], runs: Sequence[Run]) -> bool:
    """Return whether a matrix of these runs holds the parts as they are stored, each in its own format."""
    formats = {_OWN.get(part.kind) if isinstance(part, StoredTensor) else None for part in parts}
    return formats == {weights for weights, _ in runs}


def rows_of(tensor: Stored) -> tuple[Source, NDArray[np.uint8], NDArray[np.int32] | None]:
    """Return a tensor's rows as the kernels read them: their kind, bytes [rows, row bytes], and the row order.

    A row order of None means the rows are in order.
    """
    blocks = in_blocks(tensor)
    source = _SOURCES.get(blocks.kind)
    if source is not None:
        return source, blocks.data, blocks.row_order
    values = tensor.to_float32()
    return Source.FLOAT32, values.view(np.uint8).reshape(len(values), -1), None
