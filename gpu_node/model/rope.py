"""Rotary positions: the angles of a model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.spec import ModelSpec, RopeScaling


def rope_angles(spec: ModelSpec, num_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine by position, each [num_positions, head_dim / 2], for both halves of a head."""
    frequencies = (1.0 / spec.rope_theta ** (np.arange(0, spec.head_dim, 2) / spec.head_dim)).astype(np.float32)
    if spec.rope_scaling is not None:
        frequencies = _scale_llama3(frequencies, spec.rope_scaling)
    angles = np.outer(np.arange(num_positions, dtype=np.float32), frequencies)
    return np.cos(angles), np.sin(angles)


def _scale_llama3(frequencies: NDArray[np.float32], scaling: RopeScaling) -> NDArray[np.float32]:
    wavelengths = 2 * np.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clip(0.0, 1.0)
    scaled: NDArray[np.float32] = (frequencies * (blend + (1.0 - blend) / scaling.factor)).astype(np.float32)
    return scaled
