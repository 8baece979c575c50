"""Products with quantized matrices, and with the low-rank matrices of LoRA adapters."""

from __future__ import annotations

import torch
from torch import Tensor


def multiply_scaled(q: Tensor, q_scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the products of quantized rows with a matrix quantized the same way, in int8 or float8_e4m3fn.

    q: [rows, columns]; weight: [outputs, columns]; q_scales: [rows], weight_scales: [outputs], both float32; returns
    [rows, outputs] in `dtype`.
    """
    exact = q.double() @ weight.double().T
    return (exact * q_scales.double()[:, None] * weight_scales.double()).to(dtype)


def multiply_int4(x: Tensor, packed: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """Return x @ weight.T for an int4 weight: groups of 32 columns are scale * q + minimum with q in [0, 15].

    x: [rows, columns]; packed: [outputs, columns / 2] in uint8; byte i of a group holds column i in its low half and
    column i + 16 in its high half (GGUF's order); scales, minima: [outputs, columns / 32] in float16. Returns
    [rows, outputs].
    """
    groups = packed.view(len(packed), -1, 16)
    q = torch.cat((groups & 15, groups >> 4), dim=-1).float()
    weight = q * scales.float().unsqueeze(-1) + minima.float().unsqueeze(-1)
    return (x.float() @ weight.flatten(1).T).to(x.dtype)


def add_lora(out: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor) -> None:
    """Add the product of each row's adapter, x @ down.T @ up.T, in place (LoRA, arXiv:2106.09685).

    out: [rows, outputs]; x: [rows, columns]; down: [num_adapters, rank, columns]; up: [num_adapters, outputs, rank];
    adapters: [rows], -1 for none.
    """
    for row, adapter in enumerate(adapters.tolist()):
        if adapter >= 0:
            inner = x[row].float() @ down[adapter].float().T
            out[row] = (out[row].float() + inner @ up[adapter].float().T).to(out.dtype)
