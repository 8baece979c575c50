"""Triton's products with matrices of few bits, and adapters, against the references on sizes that fill no tile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.kernels.reference import layers as reference_layers
from penstock.kernels.reference import products as reference
from penstock.kernels.reference.products import quantize_int4_groups
from penstock.kernels.triton import products
from penstock.kernels.triton.int4 import multiply_int4, pack_int4, pair_scales
from penstock.kernels.triton.lora import add_lora, lora_tiles

from .conftest import TOLERANCES


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(1, 70, 40), (18, 5, 200), (70, 130, 33)], ids=str)
def test_products_of_quantized_rows(shape: tuple[int, int, int], kept: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    rows, outputs, columns = shape
    x, weight = torch.randn(rows, columns, device=device), torch.randn(outputs, columns, device=device)
    x[0] = 0
    q, scales = products.quantize_vectors(x, kept)
    # On the CPU: on a GPU torch divides by a number by multiplying with its reciprocal.
    want_q, want_scales = reference_layers.quantize_vectors(x.cpu(), kept)
    torch.testing.assert_close(scales.cpu(), want_scales)
    assert torch.equal(q.cpu().float(), want_q.float())
    quantized = q, scales, *(part.to(device) for part in reference_layers.quantize_vectors(weight.cpu(), kept))
    got, want = (module.multiply_scaled(*quantized, torch.float32) for module in (products, reference))
    # Hopper lines float8's products up by the largest of them, and drops what is 2^13 times smaller.
    is_short = kept == torch.float8_e4m3fn and device.type == "cuda"
    torch.testing.assert_close(got, want, atol=2**-10 * float(want.abs().max()) if is_short else 1e-4, rtol=1e-4)


@pytest.mark.skipif(
    not torch.cuda.is_available() and torch.__version__ < "2.12", reason="torch 2.11 has no row scales on the CPU"
)
def test_float8_products_of_the_library_equal_the_reference(device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(18, 64, device=device), torch.randn(48, 64, device=device)
    given = *products.quantize_vectors(x, torch.float8_e4m3fn), *products.quantize_vectors(weight, torch.float8_e4m3fn)
    got = products.multiply_by_library(*given, torch.bfloat16)
    want = reference.multiply_scaled(*given, torch.bfloat16)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("shape", [(1, 70, 64), (12, 33, 96), (20, 5, 224)], ids=str)
def test_products_with_int4(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    rows, outputs, columns = shape
    x = torch.randn(rows, columns, device=device).to(dtype)
    weight = torch.randn(outputs, columns, device=device)
    weight[0, :32] = 0.25
    packed = pack_int4(weight)
    got = multiply_int4(x, packed[0], pair_scales(*packed[1:]))
    want = reference.multiply_int4(x, *packed)
    tolerance = TOLERANCES[dtype] * columns**0.5
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    # And the packing means what the reference for the CPU's kernels says.
    values = torch.from_numpy(quantize_int4_groups(weight.cpu().numpy()).values())
    ones = torch.eye(columns, device=device)
    torch.testing.assert_close(reference.multiply_int4(ones, *packed).T.cpu(), values)


@pytest.mark.parametrize("rank", [4, 80])
def test_rows_of_many_adapters_beside_rows_of_none(rank: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    adapters = np.array([2, -1, *[0] * 18, 2, 1, -1], np.int32)
    x, out = (torch.randn(len(adapters), size, device=device).to(dtype) for size in (150, 70))
    down, up = (
        torch.randn(3, rank, 150, device=device).to(dtype) / 12,
        torch.randn(3, 70, rank, device=device).to(dtype) / rank,
    )
    got = out.clone()
    add_lora(got, x, down, up, torch.from_numpy(lora_tiles(adapters)).to(device))
    reference.add_lora(out, x, down, up, torch.from_numpy(adapters))
    torch.testing.assert_close(got, out, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
