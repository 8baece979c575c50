"""Products of low-bit matrices equal those of their dequantized values."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from penstock.gpu_node.model.gpu.linear import linear_of
from penstock.kernels.reference.layers import quantize_vectors
from penstock.kernels.reference.products import quantize_int4_groups


def _rounded(weight: torch.Tensor, quantization: str) -> torch.Tensor:
    if quantization == "int4":
        return torch.from_numpy(quantize_int4_groups(weight.numpy()).values())
    q, scales = quantize_vectors(weight, {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[quantization])
    return q.float() * scales.unsqueeze(-1)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.01), ("fp8", 0.04), ("int4", 1e-5)])
def test_products_err_by_the_rounding_of_activations_only(quantization: str, most: float) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, weight, bias = torch.randn(5, 96), torch.randn(40, 96), torch.randn(40)
    want = functional.linear(x, _rounded(weight, quantization), bias)
    got = linear_of(quantization)(weight.to(device), bias.to(device))(x.to(device)).cpu()
    assert (got - want).square().mean().sqrt() <= most * want.std()
