"""Rotary positions: the angles of a model, and their application to packed tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.gpu_node.model.spec import ModelSpec, RopeScaling


def rope_table(spec: ModelSpec, num_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine by position, each [num_positions, head_dim]; both halves of a head turn by the same angles."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    if spec.rope_scaling is not None:
        frequencies = _scale_llama3(frequencies, spec.rope_scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of each token. x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, 1, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def _scale_llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / scaling.factor)
