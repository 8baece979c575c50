"""What adapters add to products against the reference, over shapes that fill no vector or panel."""

from __future__ import annotations

import numpy as np
from fakes.single_kernels import Single
from fixtures.matrices import random_floats
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gpu_node.model.torch_common.positions import to_bf16
from penstock.kernels.cpu.structs import LowRankRows, RowLayout


@settings(max_examples=40)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 19), st.booleans()), min_size=1, max_size=3).filter(
        lambda sizes: any(is_there for _, _, is_there in sizes)
    ),
    columns=st.integers(1, 300),
    rows=st.integers(1, 4),
    seed=st.integers(0, 1 << 32),
)
def test_parts_of_any_shape_add_what_the_reference_adds_and_nothing_to_other_rows(
    kernels: Single, sizes: list[tuple[int, int, bool]], columns: int, rows: int, seed: int
) -> None:
    outputs = sum(count for count, _, _ in sizes)
    x, out = random_floats(rows, columns, seed=seed), random_floats(rows, outputs, seed=seed + 1)
    want, terms, parts, first = out.astype(np.float64), np.abs(out), [], 0
    for i, (count, rank, is_there) in enumerate(sizes):
        down, up = (random_floats(*shape, seed=seed + 2 * i) for shape in ((rank, columns), (count, rank)))
        if is_there:
            parts.append(LowRankRows(RowLayout.PLAIN, first, down, up))
            span, (a, b) = slice(first, first + count), (to_bf16(half).astype(np.float64) for half in (down, up))
            want[:, span] += x @ a.T @ b.T
            terms[:, span] += np.abs(x) @ np.abs(a.T) @ np.abs(b.T)
        first += count
    got = kernels.add_low_rank(out, x, parts)
    assert (np.abs(got - want) <= 2e-6 * terms + 1e-30).all()
    for row in range(rows):
        alone = kernels.add_low_rank(out[row : row + 1], x[row : row + 1], parts)
        np.testing.assert_array_equal(alone[0], got[row])
