"""Products with packed matrices against the references, over shapes that fill no tile, group or panel."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from fakes.cover import examples, pairwise
from fakes.native import ISAS
from fakes.single_kernels import Floats, Single
from fixtures.matrices import (
    OWN_SOURCES,
    PLAIN_FORMATS,
    block_columns,
    padded,
    quantized,
    random_blocks,
    random_floats,
    stored,
    values_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.gpu_node.model.torch_common.positions import to_bf16
from penstock.kernels.cpu.structs import Format, Run, Source
from penstock.kernels.reference.products import GROUP, multiply_quantized, quantize_activations

NUM_ROWS = (*range(1, 14), 17, 64, 97)
SHAPES = ((1, 1), (31, 33), (32, 32), (33, 64), (70, 200))
"""(outputs, columns)"""
QUANTIZED = (Format.INT8, Format.INT8_GROUP, Format.INT4_GROUP)


def _product(kernels: Single, weights: Format, x: Floats, matrix: Floats, num_threads: int = 1) -> Floats:
    return kernels.multiply(weights, Source.FLOAT32, stored(Source.FLOAT32, matrix), x, num_threads=num_threads)


def _assert_is_reference(got: Floats, weights: Format, x: Floats, matrix: Floats) -> None:
    """Sums of float32 products may differ in their last bits, by no more than the terms' sizes allow."""
    if weights is Format.BF16:
        left, right = to_bf16(x).astype(np.float64), to_bf16(matrix).astype(np.float64)
        want, terms = left @ right.T, np.abs(left) @ np.abs(right.T)
    else:
        packed = quantized(weights, matrix)
        want = multiply_quantized(padded(x), packed)
        terms = (
            np.abs(padded(x)) @ np.abs(packed.values().T)
            + np.abs(padded(x)).sum(-1, keepdims=True) * np.abs(packed.minimum).max()
        )
    assert (np.abs(got - want) <= 2e-6 * terms + 1e-30).all()


@pytest.mark.parametrize("rows", NUM_ROWS)
@pytest.mark.parametrize("weights", PLAIN_FORMATS)
def test_products_equal_the_reference(kernels: Single, weights: Format, rows: int) -> None:
    for outputs, columns in SHAPES:
        x, matrix = random_floats(rows, columns, seed=rows), random_floats(outputs, columns, seed=columns)
        _assert_is_reference(_product(kernels, weights, x, matrix), weights, x, matrix)


@settings(max_examples=examples(40))
@given(
    weights=st.sampled_from(PLAIN_FORMATS),
    rows=st.integers(1, 120),
    outputs=st.integers(1, 150),
    columns=st.integers(1, 700),
    seed=st.integers(0, 1 << 32),
    num_threads=st.sampled_from([1, 2, 3]),
)
def test_products_of_any_shape_equal_the_reference(
    kernels: Single, weights: Format, rows: int, outputs: int, columns: int, seed: int, num_threads: int
) -> None:
    x, matrix = random_floats(rows, columns, seed=seed), random_floats(outputs, columns, seed=seed + 1)
    _assert_is_reference(_product(kernels, weights, x, matrix, num_threads), weights, x, matrix)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12, 13])
@pytest.mark.parametrize("weights", QUANTIZED)
def test_sums_of_integers_are_exact(kernels: Single, weights: Format, rows: int) -> None:
    """Scales of one: each group's largest number is 127, so that the products are sums of integers."""
    rng = np.random.default_rng(rows)
    columns, outputs = 2048, 70
    top = 15 if weights is Format.INT4_GROUP else 127
    x = rng.integers(-127, 128, (rows, columns)).astype(np.float32)
    matrix = rng.integers(0 if top == 15 else -127, top + 1, (outputs, columns)).astype(np.float32)
    x[:, ::32] = 127 * np.where(x[:, ::32] < 0, -1, 1)
    matrix[:, 5::32] = top
    matrix[:, 6::32] = 0 if top == 15 else -127
    want = x.astype(np.int64) @ matrix.T.astype(np.int64)
    assert np.abs(want).max() < 1 << 24
    np.testing.assert_array_equal(_product(kernels, weights, x, matrix), want)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("weights", QUANTIZED)
def test_the_largest_sums_do_not_overflow(kernels: Single, weights: Format, sign: int) -> None:
    columns = 8192
    x = np.full((5, columns), 127.0, np.float32)
    matrix = np.full((3, columns), sign * 127.0, np.float32)
    got = _product(kernels, weights, x, matrix)
    np.testing.assert_allclose(got, x @ matrix.T, rtol=2e-3 if weights is Format.INT4_GROUP else 1e-5)


@pytest.mark.parametrize("weights", PLAIN_FORMATS)
@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_a_rows_bits_do_not_depend_on_rows_beside_it_or_threads(
    kernels: Single, weights: Format, num_threads: int
) -> None:
    x, matrix = random_floats(41, 300), random_floats(97, 300, seed=1)
    alone = np.concatenate([_product(kernels, weights, x[i : i + 1], matrix) for i in range(len(x))])
    for rows in (2, 3, 7, 12, 13, 41):
        np.testing.assert_array_equal(_product(kernels, weights, x[:rows], matrix, num_threads), alone[:rows])


@pytest.mark.parametrize("weights", PLAIN_FORMATS)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_nonfinite_values_stay_in_their_row(kernels: Single, weights: Format, odd: float) -> None:
    x, matrix = random_floats(14, 100), np.abs(random_floats(40, 100, seed=1)) + 0.1
    clean = _product(kernels, weights, x, matrix)
    x[4, 37] = odd
    got = _product(kernels, weights, x, matrix)
    assert not np.isfinite(got[4]).any()
    others = np.arange(14) != 4
    np.testing.assert_array_equal(got[others], clean[others])


@cache
def _blocks(source: Source, outputs: int, columns: int, seed: int) -> NDArray[np.uint8]:
    return random_blocks(outputs, columns, source, seed=seed)


@cache
def _values(source: Source, outputs: int, columns: int, seed: int) -> NDArray[np.float64]:
    """Return the values of these blocks, cached: reading takes longer than a product, and each is used 32 times."""
    return values_of(source, _blocks(source, outputs, columns, seed)).astype(np.float64)


def _stored_product(
    kernels: Single, weights: Format, x: Floats, outputs: int, seed: int, num_threads: int = 1
) -> Floats:
    data = _blocks(OWN_SOURCES[weights], outputs, x.shape[1], seed)
    return kernels.multiply(weights, OWN_SOURCES[weights], data, x, num_threads=num_threads)


@pytest.mark.parametrize(
    ("kernels", "weights", "rows"), pairwise(ISAS, OWN_SOURCES, NUM_ROWS), indirect=["kernels"], scope="session"
)
def test_products_with_stored_formats_are_those_of_what_gguf_says(kernels: Single, weights: Format, rows: int) -> None:
    """Every format with every number of rows on one instruction set in each run: a row's bits do not depend on it."""
    source = OWN_SOURCES[weights]
    for outputs, num_blocks in ((1, 1), (33, 2), (70, 5)):
        columns = num_blocks * block_columns(source)
        x = random_floats(rows, columns, seed=rows)
        matrix = _values(source, outputs, columns, columns)
        left = quantize_activations(x, GROUP).values().astype(np.float64)
        got = _stored_product(kernels, weights, x, outputs, columns)
        # A kernel adds the parts of a group's scale and minimum separately.
        terms = np.abs(left) @ np.abs(matrix.T) + np.abs(left).sum(-1, keepdims=True) * np.abs(matrix).max()
        assert (np.abs(got - left @ matrix.T) <= 2e-6 * terms + 1e-30).all()


CODES = {
    Format.Q5_1: slice(4, 24),
    Format.Q2_K: slice(16, 80),
    Format.Q3_K: slice(0, 96),
    Format.Q4_K: slice(16, 144),
    Format.Q5_K: slice(16, 176),
    Format.Q6_K: slice(0, 192),
}
"""Where blocks have their codes. With AVX2, products of small codes are summed in 16 bits."""


@pytest.mark.parametrize("weights", CODES)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_codes_of_stored_formats_do_not_overflow(kernels: Single, weights: Format, sign: int) -> None:
    source, outputs = OWN_SOURCES[weights], 40
    columns = 2 * block_columns(source)
    data = _blocks(source, outputs, columns, seed=1).copy()
    data.reshape(outputs, 2, -1)[..., CODES[weights]] = 255
    x = np.full((5, columns), sign * 127.0, np.float32)
    matrix = values_of(source, data).astype(np.float64)
    got = kernels.multiply(weights, source, data, x)
    terms = 127 * (np.abs(matrix).sum(-1) + columns * np.abs(matrix).max())
    assert (np.abs(got - x.astype(np.float64) @ matrix.T) <= 2e-6 * terms).all()


@pytest.mark.parametrize("weights", OWN_SOURCES)
@pytest.mark.parametrize("num_threads", [2, 3])
def test_a_rows_bits_with_stored_formats_do_not_depend_on_rows_beside_it_or_threads(
    kernels: Single, weights: Format, num_threads: int
) -> None:
    x = random_floats(41, 512)
    alone = np.concatenate([_stored_product(kernels, weights, x[i : i + 1], 97, seed=1) for i in range(len(x))])
    for rows in (2, 3, 7, 12, 13, 41):
        np.testing.assert_array_equal(_stored_product(kernels, weights, x[:rows], 97, 1, num_threads), alone[:rows])


@pytest.mark.parametrize("weights", OWN_SOURCES)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_nonfinite_values_stay_in_their_row_with_stored_formats(kernels: Single, weights: Format, odd: float) -> None:
    x = random_floats(14, 256)
    clean = _stored_product(kernels, weights, x, 40, seed=1)
    x[4, 37] = odd
    got = _stored_product(kernels, weights, x, 40, seed=1)
    assert not np.isfinite(got[4]).any()
    others = np.arange(14) != 4
    np.testing.assert_array_equal(got[others], clean[others])


@pytest.mark.parametrize(
    "runs",
    [
        ((Format.Q4_K, 64), (Format.Q6_K, 40)),
        ((Format.INT4_GROUP, 32), (Format.Q5_K, 32), (Format.INT8_GROUP, 5)),
        ((Format.Q2_K, 32), (Format.IQ4_XS, 32), (Format.Q3_K, 33)),
        ((Format.Q5_0, 32), (Format.IQ4_NL, 32), (Format.Q5_1, 32), (Format.Q4_0, 7)),
    ],
)
def test_runs_of_several_formats_have_the_products_of_each(kernels: Single, runs: tuple[Run, ...]) -> None:
    x = random_floats(7, 512)
    parts = [
        (weights, source, stored(source, random_floats(rows, 512, seed=rows)))
        for weights, rows in runs
        for source in [OWN_SOURCES.get(weights, Source.FLOAT32)]
    ]
    alone = [kernels.multiply(weights, source, data, x) for weights, source, data in parts]
    np.testing.assert_array_equal(kernels.multiply_fused(parts, x), np.concatenate(alone, axis=1))


@pytest.mark.parametrize("count", [16, 32, 48, 576])
def test_rows_are_quantized_as_the_reference_does(kernels: Single, count: int) -> None:
    for seed in range(20):
        row = random_floats(count, seed=seed)
        want = quantize_activations(row[None], count)
        scale, q, total = kernels.quantize(row)
        assert np.float32(scale) == want.scale.item()
        np.testing.assert_array_equal(q, want.q[0, 0])
        assert total == want.q.sum()


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 1e-37, 3e-37, 1e38, 3.4e38])
def test_rows_of_any_size_are_quantized(kernels: Single, largest: float) -> None:
    row = np.zeros(32, np.float32)
    row[3], row[9] = largest, -largest / 2
    scale, q, total = kernels.quantize(row)
    assert abs(q).max() <= 127 and total == q.astype(int).sum()
    np.testing.assert_allclose(scale * q.astype(np.float64), row, atol=max(largest / 254 * 1.01, 1e-36))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_the_scale_of_a_row_that_is_not_finite_is_nan(kernels: Single, odd: float) -> None:
    for place in (0, 15, 17, 47):
        row = random_floats(48)
        row[place] = odd
        assert np.isnan(kernels.quantize(row)[0])
