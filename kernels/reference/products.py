"""Products with matrices of few bits, and with the small matrices of adapters."""

from __future__ import annotations

import torch
from torch import Tensor


def multiply_scaled(q: Tensor, q_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Products of quantised rows with a matrix of rows quantised alike, in int8 or float8_e4m3fn.

    q: [rows, columns]; weight: [outputs, columns]; q_scales: [rows], weight_scales: [outputs], both float32; returns
    [rows, outputs] in `dtype`.
    """
    exact = q.double() @ weight.double().T
    return (exact * q_scales.double()[:, None] * weight_scales.double()).to(dtype)


def multiply_int4(x: Tensor, packed: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """Products x @ weight.T, the weight in groups of 32 columns that are scale * q + minimum, q in [0, 15].

    x: [rows, columns]; packed: [outputs, columns / 2] in uint8, byte i of a group holds its column i and, in the high
    half, its column i + 16 (GGUF's order); scales, minima: [outputs, columns / 32] in float16. Returns [rows, outputs].
    """
    groups = packed.view(len(packed), -1, 16)
    q = torch.cat((groups & 15, groups >> 4), dim=-1).float()
    weight = q * scales.float().unsqueeze(-1) + minima.float().unsqueeze(-1)
    return (x.float() @ weight.flatten(1).T).to(x.dtype)


def add_lora(out: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor) -> None:
    """Add to each row what its adapter says, x @ down.T @ up.T (LoRA, arXiv:2106.09685), in place.

    out: [rows, outputs]; x: [rows, columns]; down: [num_adapters, rank, columns]; up: [num_adapters, outputs, rank];
    adapters: [rows], -1 for none.
    """
    for row, adapter in enumerate(adapters.tolist()):
        if adapter >= 0:
            inner = x[row].float() @ down[adapter].float().T
            out[row] = (out[row].float() + inner @ up[adapter].float().T).to(out.dtype)
