"""The choice of kernel format for each matrix."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.checkpoint.files import Stored
from penstock.gpu_node.model.checkpoint.gguf_blocks import block_kind, in_blocks
from penstock.kernels.cpu.library import Format, Source

_FORMATS = {"none": Format.BF16, "int8": Format.INT8, "int8_group": Format.INT8_GROUP, "int4": Format.INT4_GROUP}
_OWN = {
    **dict.fromkeys(("bfloat16", "float16", "float32"), Format.BF16),
    **dict.fromkeys(("q4_0", "q4_1"), Format.INT4_GROUP),
}
"""The lossless format of each stored kind. Every other kind is dequantized and kept as grouped int8."""
_BY_PRECISION = (Format.BF16, Format.INT8, Format.INT8_GROUP, Format.INT4_GROUP)
_SOURCES = {
    "float32": Source.FLOAT32,
    "bfloat16": Source.BFLOAT16,
    "q4_0": Source.Q4_0,
    "q4_1": Source.Q4_1,
    "q8_0": Source.Q8_0,
    "q4_k": Source.Q4_K,
    "q5_k": Source.Q5_K,
    "q6_k": Source.Q6_K,
    "float16": Source.FLOAT16,
}


def format_of(parts: Iterable[Stored], quantization: str) -> Format:
    """Return the format of a matrix made of `parts`.

    With `auto` it is the most precise format among those of the parts, else the format that was asked for.
    """
    if quantization != "auto":
        return _FORMATS[quantization]
    return min((_OWN.get(block_kind(part), Format.INT8_GROUP) for part in parts), key=_BY_PRECISION.index)


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
