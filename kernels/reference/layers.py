"""The small operations between the matrix products."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm in float32. x: [..., hidden]; weight: [hidden]; returns x's shape and dtype."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Norm by mean and variance in float32. x: [..., hidden]; weight, bias: [hidden]; returns x's shape and dtype."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float() + bias.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2), as the Hugging Face checkpoints of Llama are laid out.

    x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, head_dim // 2]; returns x's shape and dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up in float32. gate_up: [num_tokens, 2 * inter], gate first; returns [num_tokens, inter]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
