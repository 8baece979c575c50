"""How tokens know their places: tables of angles or of biases, computed once for a model."""

from __future__ import annotations

from math import ceil, floor, log, log2, pi, sqrt

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.architecture.spec import (
    DynamicScaling,
    FactorsScaling,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    Rope,
    YarnScaling,
)
from penstock.kernels.reference.quantised import to_bf16

Table = NDArray[np.float32]


def rope_angles(rope: Rope, num_positions: int) -> tuple[Table, Table]:
    """Cosine and sine by position, each [num_positions, rope.dim / 2], for both halves of what rotates."""
    positions = np.arange(num_positions, dtype=np.float32)[:, None]
    angles = positions * _frequencies(rope, num_positions)
    magnitude = np.float32(rope.scaling.magnitude if isinstance(rope.scaling, YarnScaling) else 1)
    return np.cos(angles) * magnitude, np.sin(angles) * magnitude


def _frequencies(rope: Rope, num_positions: int) -> Table:
    """By position where they depend on it, else [1, rope.dim / 2]."""
    scaling = rope.scaling
    if isinstance(scaling, DynamicScaling):
        return _powers(_growing_theta(rope, scaling, num_positions), rope.dim)
    frequencies = _powers(np.array([[rope.theta]]), rope.dim)
    if isinstance(scaling, LinearScaling):
        return frequencies / np.float32(scaling.factor)
    if isinstance(scaling, FactorsScaling):
        factors: Table = np.array(scaling.factors, dtype=np.float32)
        return frequencies / factors
    if isinstance(scaling, YarnScaling):
        return _blended(frequencies, _yarn_kept(rope, scaling), scaling.factor)
    return frequencies if scaling is None else _blended(frequencies, _llama3_kept(frequencies, scaling), scaling.factor)


def _powers(theta: NDArray[np.float64], dim: int) -> Table:
    """theta: [n, 1]; returns [n, dim / 2]."""
    return (1.0 / theta ** (np.arange(0, dim, 2) / dim)).astype(np.float32)


def _growing_theta(rope: Rope, scaling: DynamicScaling, num_positions: int) -> NDArray[np.float64]:
    """Each token is rotated as if the text ended with it, so that how a text is cut into steps changes nothing."""
    length = np.maximum(np.arange(1, num_positions + 1), scaling.original_max_position)[:, None]
    growth = scaling.factor * length / scaling.original_max_position - (scaling.factor - 1)
    grown: NDArray[np.float64] = rope.theta * growth ** (rope.dim / (rope.dim - 2))
    return grown


def _blended(frequencies: Table, kept: NDArray[np.floating], factor: float) -> Table:
    """Frequencies of which a share, in [0, 1], is kept and the rest divided."""
    blended: Table = (frequencies * (kept + (1.0 - kept) / factor)).astype(np.float32)
    return blended


def _llama3_kept(frequencies: Table, scaling: Llama3Scaling) -> NDArray[np.floating]:
    wavelengths = 2 * np.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept.clip(0.0, 1.0)


def _yarn_kept(rope: Rope, scaling: YarnScaling) -> NDArray[np.floating]:
    def channel(turns: float) -> float:
        """That turns so often in the original length."""
        return rope.dim * log(scaling.original_max_position / (turns * 2 * pi)) / (2 * log(rope.theta))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.whole_channels:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    # Nothing lies between where they are one.
    between = last - first or 1e-3
    return 1 - ((np.arange(rope.dim // 2) - first) / between).clip(0.0, 1.0)


def alibi_biases(spec: ModelSpec, num_positions: int) -> Table:
    """What is added to the scores of a token at each position, [num_heads, num_positions] (arXiv:2108.12409).

    A score's bias may be shifted by what is the same for all tokens, so the seen token's position stands for its
    distance. Falcon was trained with slopes, positions and products rounded to bfloat16, and is run with them.
    """
    slopes = to_bf16(np.array(_slopes(spec.num_heads), dtype=np.float32))
    products: Table = np.outer(slopes, to_bf16(np.arange(num_positions, dtype=np.float32)))
    return to_bf16(products) / np.float32(sqrt(spec.head_dim))


def _slopes(num_heads: int) -> list[float]:
    """A geometric series for a power of two of heads; other numbers take every second one of the next such series."""
    whole = 2 ** floor(log2(num_heads))
    rest = num_heads - whole
    return [2 ** (-8 * i / whole) for i in range(1, whole + 1)] + [
        2 ** (-8 * i / (2 * whole)) for i in range(1, 2 * rest, 2)
    ]
