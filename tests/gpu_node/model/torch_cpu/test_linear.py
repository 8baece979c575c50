"""Products with weights in every layout."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from penstock.gpu_node.model.torch_cpu.load import Linear, can_prepack


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64])
def test_equals_the_plain_product(dtype: torch.dtype, num_tokens: int) -> None:
    torch.manual_seed(0)
    weight, wide = torch.randn(48, 40).to(dtype), torch.randn(num_tokens, 80).to(dtype)
    linear = Linear(weight)
    for x in (wide[:, :40].contiguous(), wide[:, ::2]):
        torch.testing.assert_close(linear(x), functional.linear(x, weight))


def test_a_build_without_prepacking_multiplies_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(48, 40).bfloat16(), torch.randn(3, 40).bfloat16()
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    can_prepack.cache_clear()
    try:
        assert not can_prepack(torch.bfloat16)
        assert torch.equal(Linear(weight)(x), functional.linear(x, weight))
    finally:
        can_prepack.cache_clear()
