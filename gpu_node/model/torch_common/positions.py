"""Position tables, computed once per model: RoPE angles or ALiBi biases."""

from __future__ import annotations

from math import ceil, floor, log, log2, pi, sqrt

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.architecture.rope import (
    DynamicScaling,
    FactorsScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from penstock.gpu_node.model.architecture.spec import Attention, QueryGrowth

Table = NDArray[np.float32]


def to_bf16(x: Table) -> Table:
    """Round to the nearest bfloat16, ties to even. x: finite."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def rope_angles(rope: Rope, num_positions: int) -> tuple[Table, Table]:
    """Return cosines and sines by position, each [num_positions, rope.dim / 2]; both halves of a head share them."""
    shape = num_positions, rope.dim // 2
    tables = np.empty(shape, np.float32), np.empty(shape, np.float32)
    write_rope_angles(rope, *tables)
    return tables


def write_rope_angles(rope: Rope, cosines: Table, sines: Table) -> None:
    """Write the tables of `rope_angles`, without further arrays of their size."""
    positions = np.arange(len(cosines), dtype=np.float32)[:, None]
    angles = np.multiply(positions, _frequencies(rope, len(cosines)), out=sines)
    np.cos(angles, out=cosines)
    np.sin(angles, out=sines)
    magnitude = np.float32(rope.scaling.magnitude if isinstance(rope.scaling, YarnScaling | LongScaling) else 1)
    if magnitude != 1:
        cosines *= magnitude
        sines *= magnitude


def _frequencies(rope: Rope, num_positions: int) -> Table:
    """Return frequencies: [num_positions, rope.dim / 2] where they depend on the position, else [1, rope.dim / 2]."""
    scaling = rope.scaling
    if isinstance(scaling, DynamicScaling):
        return _powers(_growing_theta(rope, scaling, num_positions), rope.dim)
    frequencies = _powers(np.array([[rope.theta]]), rope.dim)
    if isinstance(scaling, LinearScaling):
        return frequencies / np.float32(scaling.factor)
    if isinstance(scaling, ProportionalScaling):
        is_turned = np.arange(frequencies.shape[-1]) < scaling.num_turned
        turned: Table = np.where(is_turned, frequencies / np.float32(scaling.factor), np.float32(0))
        return turned
    if isinstance(scaling, FactorsScaling):
        factors: Table = np.array(scaling.factors, dtype=np.float32)
        return frequencies / factors
    if isinstance(scaling, LongScaling):
        is_long = num_positions > scaling.original_max_position
        divisors: Table = np.array(scaling.long if is_long else scaling.short, dtype=np.float32)
        return frequencies / divisors
    if isinstance(scaling, YarnScaling):
        return _blended(frequencies, _yarn_kept(rope, scaling), scaling.factor)
    return frequencies if scaling is None else _blended(frequencies, _llama3_kept(frequencies, scaling), scaling.factor)


def _powers(theta: NDArray[np.float64], dim: int) -> Table:
    """Return the RoPE frequencies of `dim` channels, [n, dim / 2]. theta: [n, 1]."""
    return (1.0 / theta ** (np.arange(0, dim, 2) / dim)).astype(np.float32)


def _growing_theta(rope: Rope, scaling: DynamicScaling, num_positions: int) -> NDArray[np.float64]:
    """Return theta by position, [num_positions, 1], as if the text ended at that position.

    So the result does not depend on how a prompt is split into steps.
    """
    length = np.maximum(np.arange(1, num_positions + 1), scaling.original_max_position)[:, None]
    growth = scaling.factor * length / scaling.original_max_position - (scaling.factor - 1)
    grown: NDArray[np.float64] = rope.theta * growth ** (rope.dim / (rope.dim - 2))
    return grown


def _blended(frequencies: Table, kept: NDArray[np.floating], factor: float) -> Table:
    """Interpolate between frequencies (kept = 1) and frequencies / factor (kept = 0)."""
    blended: Table = (frequencies * (kept + (1.0 - kept) / factor)).astype(np.float32)
    return blended


def _llama3_kept(frequencies: Table, scaling: Llama3Scaling) -> NDArray[np.floating]:
    wavelengths = 2 * np.pi / frequencies
    rotations = scaling.original_max_position / wavelengths
    kept = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept.clip(0.0, 1.0)


def _yarn_kept(rope: Rope, scaling: YarnScaling) -> NDArray[np.floating]:
    def channel(rotations: float) -> float:
        """Return the channel that makes this many rotations within the original length."""
        return rope.dim * log(scaling.original_max_position / (rotations * 2 * pi)) / (2 * log(rope.theta))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.whole_channels:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    # Avoid a division by zero where both bounds are equal.
    between = last - first or 1e-3
    return 1 - ((np.arange(rope.dim // 2) - first) / between).clip(0.0, 1.0)


def query_factors(growth: QueryGrowth, num_positions: int) -> Table:
    """Return the factor of queries by position, [num_positions]."""
    positions = np.arange(num_positions, dtype=np.float32)
    factors: Table = 1 + np.float32(growth.beta) * np.log1p(np.floor(positions / np.float32(growth.length)))
    return factors


def alibi_biases(attention: Attention, num_positions: int) -> Table:
    """Return the ALiBi biases by key position, [num_heads, num_positions] (arXiv:2108.12409).

    Softmax ignores a shift that is the same for all keys, so the key's position replaces its distance to the query.
    Slopes, positions and products are rounded to bfloat16, because Falcon was trained that way.
    """
    slopes = to_bf16(np.array(_slopes(attention.num_heads), dtype=np.float32))
    products: Table = np.outer(slopes, to_bf16(np.arange(num_positions, dtype=np.float32)))
    return to_bf16(products) / np.float32(sqrt(attention.head_dim))


def _slopes(num_heads: int) -> list[float]:
    """Return the ALiBi slope of each head: a geometric series for a power of two of heads.

    For other numbers, the remaining heads take every second slope of the series for the next power of two.
    """
    whole = 2 ** floor(log2(num_heads))
    rest = num_heads - whole
    return [2 ** (-8 * i / whole) for i in range(1, whole + 1)] + [
        2 ** (-8 * i / (2 * whole)) for i in range(1, 2 * rest, 2)
    ]
