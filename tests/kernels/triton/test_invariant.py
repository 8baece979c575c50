"""Products whose rows do not depend on each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from penstock.kernels.triton import invariant
from penstock.kernels.triton.invariant import multiply_invariant

from .conftest import TOLERANCES


@pytest.mark.parametrize("columns", [70, 2100], ids=["one part", "three parts"])
def test_a_row_is_the_same_alone_and_in_any_batch(columns: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, columns, device=device).to(dtype) / columns**0.25 for rows in (67, 70))
    bias = torch.randn(70, device=device).to(dtype)
    got = multiply_invariant(x, weight, bias)
    want = functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(got.double(), want, atol=TOLERANCES[dtype] * 4, rtol=TOLERANCES[dtype])
    for rows in (slice(0, 1), slice(66, 67), slice(5, 25)):
        assert torch.equal(multiply_invariant(x[rows], weight, bias), got[rows])
    assert torch.equal(multiply_invariant(x[:2], weight, None), multiply_invariant(x, weight, None)[:2])


def test_many_rows_are_multiplied_in_pieces_of_bounded_memory(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, 2100, device=device) for rows in (150, 8))
    whole = multiply_invariant(x, weight, None)
    # Three parts of 64 rows: pieces of 64, 64 and 22 rows.
    monkeypatch.setattr(invariant, "_MAX_PARTS_BYTES", 3 * 64 * 8 * 4)
    made: list[tuple[Any, ...]] = []
    multiply_piece = invariant._multiply_piece

    def watched(*given: Any) -> None:
        made.append(given)
        multiply_piece(*given)

    monkeypatch.setattr(invariant, "_multiply_piece", watched)
    assert torch.equal(multiply_invariant(x, weight, None), whole)
    assert [len(out) for out, *_ in made] == [64, 64, 22]
    assert {parts.nbytes for _, parts, *_ in made} == {3 * 64 * 8 * 4}
