"""Products of few rows with a matrix in 16 bits, against float64, on sizes that fill no tile."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.triton.few_rows import MOST_ROWS, multiply_few

from .conftest import TOLERANCES


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 17, MOST_ROWS])
@pytest.mark.parametrize("shape", [(70, 200), (33, 1100)], ids=str)
def test_products_of_few_rows(
    rows: int, shape: tuple[int, int], has_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    if dtype == torch.float32 and device.type == "cuda":
        pytest.skip("its tiles are for 16 bits; the interpreter computes in 32")
    torch.manual_seed(0)
    outputs, columns = shape
    x, weight = (torch.randn(n, columns, device=device).to(dtype) for n in (rows, outputs))
    bias = torch.randn(outputs, device=device).to(dtype) if has_bias else None
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    got = multiply_few(x, weight, bias)
    assert got.dtype == dtype
    tolerance = TOLERANCES[dtype] * columns**0.5
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
