"""NVFP4: numbers of four bits (E2M1), a float8 scale for each 16 columns, and a float32 scale for the matrix.

Columns 2 i and 2 i + 1 of a row are in the low and the high half of its byte i. Twice a number is whole, so the numbers
are read as int8. Scales of activations are not used: activations stay unquantized or are scaled dynamically.
https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-quantized-types.html
"""

from __future__ import annotations

import numpy as np

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.methods.parts import Parts
from penstock.gpu_node.model.checkpoint.scaled_matrix import FP8_VALUES, ScaledTensor

GROUP = 16
_SIZES = (0, 1, 2, 3, 4, 6, 8, 12)
_TWICE = np.array((*_SIZES, *(-size for size in _SIZES)), np.int8)
"""Twice the number of each code."""
_MATRIX_DIMS = 2


def read_float4(parts: Parts, packed: str, whole_scale: str, *, is_divisor: bool) -> ScaledTensor | None:
    """Return a matrix that is stored in NVFP4; None for other matrices.

    packed: the part with the codes; whole_scale: that with the matrix's scale, by which the scales of columns are
    multiplied, or divided if `is_divisor`. Raises ConfigError for parts that do not fit together.
    """
    codes = parts.find(packed)
    if codes is None or codes.kind != "u8":
        return None
    scales = parts.get("weight_scale")
    if len(codes.shape) != _MATRIX_DIMS:
        raise ConfigError(f"tensor {codes.name} is u8 {list(codes.shape)} but must be a matrix")
    rows, half = codes.shape
    needed = rows, 2 * half // GROUP
    if 2 * half % GROUP or scales.kind != "f8_e4m3" or scales.shape != needed:
        found = f"{scales.kind} {list(scales.shape)}"
        raise ConfigError(
            f"tensor {scales.name} is {found}, but {codes.name} u8 {list(codes.shape)} needs f8_e4m3 with a scale for "
            f"each {GROUP} columns"
        )
    whole = parts.get(whole_scale)
    if np.prod(whole.shape) != 1:
        raise ConfigError(f"tensor {whole.name} has shape {list(whole.shape)} but must be one number")
    factor = np.float32(whole.to_float32().item())
    if not np.isfinite(factor) or factor <= 0:
        raise ConfigError(f"tensor {whole.name} is {factor} but must be a finite number above 0")
    numbers = np.empty((rows, 2 * half), np.int8)
    octets = codes.data.reshape(rows, half)
    numbers[:, ::2], numbers[:, 1::2] = _TWICE[octets & 15], _TWICE[octets >> 4]
    by_group = FP8_VALUES[scales.data.reshape(needed)]
    by_group = by_group / factor if is_divisor else by_group * factor
    return ScaledTensor(parts.name, "int8", numbers, by_group / np.float32(2), None, GROUP)
