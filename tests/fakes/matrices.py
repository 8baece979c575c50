"""Matrices of made-up weights as files keep them, and what the native kernels' formats make of them."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType, dequantize, quantize
from gguf.constants import GGML_QUANT_SIZES
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
K_BLOCKS = {
    Source.Q4_K: GGMLQuantizationType.Q4_K,
    Source.Q5_K: GGMLQuantizationType.Q5_K,
    Source.Q6_K: GGMLQuantizationType.Q6_K,
}
"""Those that come in blocks of 256, which the package gguf reads but does not make."""
_SCALES_AT = {"q4_k": 0, "q5_k": 0, "q6_k": 208}
"""Where in such a block its scale is; those at its head are followed by that of what is subtracted."""
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


def random_blocks(rows: int, columns: int, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Rows in one of the formats with blocks of 256: numbers of either sign, most of them within a few tenths."""
    rng, (block, size), at = np.random.default_rng(0), GGML_QUANT_SIZES[kind], _SCALES_AT[kind.name.lower()]
    blocks = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    scales = rng.uniform(2e-4, 5e-4, blocks.shape[:2])
    for i, part in enumerate((scales / 4,) if at else (scales, scales * 7.5)):
        blocks[..., at + 2 * i : at + 2 * i + 2] = part.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def stored(source: Source, weights: Floats) -> NDArray[np.uint8]:
    """Weights as a source keeps them, [rows, bytes of a row]; any weights for blocks of 256."""
    if source in K_BLOCKS:
        return random_blocks(*weights.shape, K_BLOCKS[source])
    if source in BLOCKS:
        blocks: NDArray[np.uint8] = quantize(weights, BLOCKS[source])
        return blocks
    if source is Source.FLOAT16:
        return weights.astype(np.float16).view(np.uint8)
    plain = weights if source is Source.FLOAT32 else (to_bf16(weights).view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(plain).view(np.uint8)


def values_of(source: Source, data: NDArray[np.uint8]) -> Floats:
    """What a source's bytes say; GGUF's by the package gguf."""
    if source in BLOCKS or source in K_BLOCKS:
        values: Floats = dequantize(data, (BLOCKS | K_BLOCKS)[source])
        return values
    if source is Source.FLOAT16:
        return data.view(np.float16).astype(np.float32)
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
