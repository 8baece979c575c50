"""Matrices of made-up weights as files keep them, and what the native kernels' formats make of them."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType, dequantize, quantize
from numpy.typing import NDArray

from penstock.kernels.cpu.library import Format, Source
from penstock.kernels.reference.quantised import (
    GROUP,
    Floats,
    Quantised,
    quantise_int4_groups,
    quantise_int8,
    quantise_int8_groups,
    to_bf16,
)

BLOCKS = {
    Source.Q4_0: GGMLQuantizationType.Q4_0,
    Source.Q4_1: GGMLQuantizationType.Q4_1,
    Source.Q8_0: GGMLQuantizationType.Q8_0,
}
"""Sources that come in GGUF's blocks of 32 columns."""
_QUANTISERS = {
    Format.INT8: quantise_int8,
    Format.INT8_GROUP: quantise_int8_groups,
    Format.INT4_GROUP: quantise_int4_groups,
}


def random_floats(*shape: int, seed: int = 0) -> Floats:
    """Normal numbers whose size differs from place to place."""
    rng = np.random.default_rng(seed)
    values: Floats = (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(np.float32)
    return values


def stored(source: Source, weights: Floats) -> NDArray[np.uint8]:
    """Weights as a source keeps them, [rows, bytes of a row]."""
    if source in BLOCKS:
        blocks: NDArray[np.uint8] = quantize(weights, BLOCKS[source])
        return blocks
    plain = weights if source is Source.FLOAT32 else (to_bf16(weights).view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(plain).view(np.uint8)


def values_of(source: Source, data: NDArray[np.uint8]) -> Floats:
    """What a source's bytes say; GGUF's by the package gguf."""
    if source in BLOCKS:
        values: Floats = dequantize(data, BLOCKS[source])
        return values
    return data.view(np.float32) if source is Source.FLOAT32 else (data.view("<u2").astype(np.uint32) << 16).view("<f4")


def padded(values: Floats) -> Floats:
    """Columns filled up to groups with zeros."""
    return np.pad(values, ((0, 0), (0, -values.shape[1] % GROUP)))


def quantised(weights: Format, values: Floats) -> Quantised:
    """Values in one of the formats of small integers."""
    return _QUANTISERS[weights](padded(values))


def kept(weights: Format, values: Floats) -> Floats:
    """What is left of values in a format."""
    if weights is Format.BF16:
        return to_bf16(values)
    return quantised(weights, values).values()[:, : values.shape[1]]
