"""Which instruction sets compute the same bits, because nodes of the same arithmetic continue each other's jobs."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.native import built
from fakes.single_kernels import Single
from fixtures.matrices import OWN_SOURCES, block_columns, random_blocks, random_floats, stored
from numpy.typing import NDArray

from penstock.kernels.cpu.probe import REQUIRED_FLAGS, Isa, cpu_flags
from penstock.kernels.cpu.structs import Format, Source

INTEGERS = [Format.INT8, *OWN_SOURCES]


def here(*isas: Isa) -> list[Single]:
    """The kernels of those sets that this CPU has; skips where it has fewer than two."""
    found = [isa for isa in isas if REQUIRED_FLAGS[isa] <= cpu_flags()]
    if len(found) < 2:
        pytest.skip(f"this CPU has only {', '.join(found) or 'none'} of {', '.join(isas)}")
    return [Single(built(isa)) for isa in found]


def product(kernels: Single, weights: Format, rows: int) -> NDArray[np.float32]:
    source = OWN_SOURCES.get(weights)
    columns = 3 * (160 if source is None else block_columns(source))
    x = random_floats(rows, columns, seed=rows)
    if source is None:
        return kernels.multiply(weights, Source.FLOAT32, stored(Source.FLOAT32, random_floats(70, columns, seed=1)), x)
    return kernels.multiply(weights, source, random_blocks(70, columns, source, seed=columns), x)


@pytest.mark.parametrize("weights", INTEGERS)
@pytest.mark.parametrize("rows", [1, 7, 41])
def test_products_of_integers_have_the_same_bits_on_every_set(weights: Format, rows: int) -> None:
    first, *others = here(*REQUIRED_FLAGS)
    for other in others:
        np.testing.assert_array_equal(product(other, weights, rows), product(first, weights, rows))


@pytest.mark.parametrize("rows", [1, 7, 41])
def test_products_of_bf16_without_its_instruction_have_the_bits_of_avx2(rows: int) -> None:
    wide, narrow = here("avx512_vnni", "avx2")
    np.testing.assert_array_equal(product(wide, Format.BF16, rows), product(narrow, Format.BF16, rows))


def test_odd_numbers_of_bf16_without_its_instruction_have_the_bits_of_avx2() -> None:
    """Denormal numbers count, infinities stay and a NaN stays one."""
    wide, narrow = here("avx512_vnni", "avx2")
    matrix = stored(Source.FLOAT32, random_floats(33, 64, seed=1))
    x = random_floats(4, 64)
    x[0, ::3], x[1, 5], x[2, 7], x[3] = 1e-40, np.inf, np.nan, 3e38
    got, want = (kernels.multiply(Format.BF16, Source.FLOAT32, matrix, x) for kernels in (wide, narrow))
    np.testing.assert_array_equal(got, want)
