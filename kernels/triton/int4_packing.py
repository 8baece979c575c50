"""Quantizes matrices to int4, and arranges their scales as the products read them."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Columns that share a scale in int4."""


def pair_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """Return the words [groups, outputs] in int32 that hold scales [outputs, groups] and minima, both in float16.

    The scale is in the lower half. Programs read one word per group and output, and outputs follow one another.
    """
    return torch.stack((scales, minima), dim=-1).contiguous().view(torch.int32)[..., 0].t().contiguous()


def pack_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix, [outputs, columns in whole groups]: return packed, scales and minima as the reference does."""
    groups = weight.float().view(len(weight), -1, GROUP)
    minima = groups.amin(-1).half()
    spans = (groups.amax(-1) - minima.float()).clamp(min=0)
    scales = (spans / 15).half()
    # With a scale that was rounded down, q could not reach the largest number of its group. The next larger float16 of
    # a positive one has the next bits.
    larger = (scales.view(torch.int16) + 1).view(torch.float16)
    scales = torch.where(scales.float() < spans / 15, larger, scales)
    divisors = torch.where(scales > 0, scales.float(), 1.0).unsqueeze(-1)
    q = ((groups - minima.float().unsqueeze(-1)) / divisors).round().clamp(0, 15).to(torch.uint8)
    packed = q[..., :16] | (q[..., 16:] << 4)
    return packed.flatten(1).contiguous(), scales, minima
