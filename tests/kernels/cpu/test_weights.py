"""Packed matrices: every format from every source, as the kernels see it, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.cover import examples, pairwise
from fakes.single_kernels import Single
from fixtures.matrices import (
    BLOCKS,
    K_BLOCKS,
    OWN_SOURCES,
    PLAIN_FORMATS,
    block_columns,
    kept,
    random_blocks,
    random_floats,
    stored,
    values_of,
)
from gguf import GGMLQuantizationType, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.cpu.structs import Format, RowLayout, Source

LOSSLESS = {
    (Format.BF16, Source.BFLOAT16),
    (Format.INT8_GROUP, Source.Q8_0),
    (Format.INT4_GROUP, Source.Q4_0),
    (Format.INT4_GROUP, Source.Q4_1),
}


@pytest.mark.parametrize(("weights", "source", "rows"), pairwise(PLAIN_FORMATS, Source, [1, 31, 32, 33, 70]))
def test_packed_rows_equal_the_reference(kernels: Single, weights: Format, source: Source, rows: int) -> None:
    for columns in (256, 768) if source in K_BLOCKS else (32, 96, 160) if source in BLOCKS else (1, 31, 32, 50, 160):
        data = stored(source, random_floats(rows, columns, seed=rows))
        values = values_of(source, data)
        want = values if (weights, source) in LOSSLESS else kept(weights, values)
        np.testing.assert_array_equal(kernels.repack(weights, source, data, columns), want)


@pytest.mark.parametrize("weights", PLAIN_FORMATS)
@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 1 << 32),
    size=st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 300.0]),
    shift=st.sampled_from([0.0, -1.0, 5.0]),
    spikes=st.integers(0, 3),
)
def test_numbers_of_any_size_are_kept_as_the_reference_keeps_them(
    kernels: Single, weights: Format, seed: int, size: float, shift: float, spikes: int
) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((3, 70)) * size + shift * size).astype(np.float32)
    values[rng.integers(3, size=spikes), rng.integers(70, size=spikes)] *= 50
    values[1] = 0
    got = kernels.repack(weights, Source.FLOAT32, stored(Source.FLOAT32, values), 70)
    np.testing.assert_array_equal(got, kept(weights, values))


@pytest.mark.parametrize("weights", [Format.INT8, Format.INT8_GROUP, Format.INT4_GROUP])
def test_what_is_lost_is_at_most_half_a_step(kernels: Single, weights: Format) -> None:
    values = random_floats(33, 160)
    groups = values.reshape(33, -1, 160 if weights is Format.INT8 else 32)
    if weights is Format.INT4_GROUP:
        # The lowest value itself is rounded to a float16.
        step = np.ptp(groups, axis=-1) / 15 + np.abs(groups).max(-1) * 2.0**-9
    else:
        step = np.abs(groups).max(-1) / 127 * (1 + 2.0**-10)
    got = kernels.repack(weights, Source.FLOAT32, stored(Source.FLOAT32, values), 160)
    assert (np.abs(got - values).reshape(groups.shape) <= step[..., None] * 0.501).all()


@pytest.mark.parametrize("weights", PLAIN_FORMATS)
def test_bytes_around_the_rows_are_not_read_as_weights(kernels: Single, weights: Format) -> None:
    """Columns that end within a group, with a NaN right behind each row's end."""
    values = np.full((5, 51), np.nan, np.float32)
    values[:, :50] = random_floats(5, 50)
    got = kernels.repack(weights, Source.FLOAT32, values.view(np.uint8), 50)
    np.testing.assert_array_equal(got, kept(weights, values[:, :50].copy()))


@pytest.mark.parametrize("weights", PLAIN_FORMATS)
def test_infinity_in_a_row_leaves_the_rows_beside_it_alone(kernels: Single, weights: Format) -> None:
    values = random_floats(34, 64)
    odd = values.copy()
    odd[3, 7] = np.inf
    got = kernels.repack(weights, Source.FLOAT32, stored(Source.FLOAT32, odd), 64)
    assert not np.isfinite(got[3]).all()
    others = np.arange(34) != 3
    np.testing.assert_array_equal(got[others], kept(weights, values)[others])


@pytest.mark.parametrize("weights", PLAIN_FORMATS)
def test_nan_in_a_row_does_not_become_a_number(kernels: Single, weights: Format) -> None:
    values = random_floats(2, 64)
    values[1, 9] = np.nan
    got = kernels.repack(weights, Source.FLOAT32, stored(Source.FLOAT32, values), 64)
    assert np.isnan(got[1, 9])
    assert np.isfinite(got[0]).all()


def test_the_extremes_of_ggufs_blocks_come_back(kernels: Single) -> None:
    values = np.tile(np.linspace(-1, 1, 32, dtype=np.float32), (2, 2))
    for source, kind in BLOCKS.items():
        data = quantize(values, kind)
        bytes_of_block = data.shape[1] // 2
        header = 4 if kind is GGMLQuantizationType.Q4_1 else 2
        blocks = data.reshape(-1, bytes_of_block)
        blocks[:, header:] = np.random.default_rng(0).integers(0, 256, blocks[:, header:].shape)
        blocks[0, header:], blocks[1, header:], blocks[2, header:] = 0x80, 0x7F, 0xFF
        weights = Format.INT8_GROUP if source is Source.Q8_0 else Format.INT4_GROUP
        np.testing.assert_array_equal(kernels.repack(weights, source, data, 64), values_of(source, data))


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("weights", OWN_SOURCES)
def test_packed_stored_formats_are_what_gguf_says(kernels: Single, weights: Format, rows: int) -> None:
    source = OWN_SOURCES[weights]
    for num_blocks in (1, 3):
        columns = num_blocks * block_columns(source)
        data = random_blocks(rows, columns, source, seed=rows)
        np.testing.assert_array_equal(kernels.repack(weights, source, data, columns), values_of(source, data))


@pytest.mark.parametrize("weights", OWN_SOURCES)
def test_stored_formats_take_as_many_bytes_as_their_blocks(kernels: Single, weights: Format) -> None:
    data = random_blocks(64, 512, OWN_SOURCES[weights])
    assert kernels.num_bytes(weights, 64, 512) == data.nbytes


@pytest.mark.parametrize("rows", [16, 40, 64])
def test_two_parts_interleave_by_halves_of_a_panel_and_cover_it(kernels: Single, rows: int) -> None:
    first, second = ([kernels.packed_row(layout, 0, i) for i in range(rows)] for layout in (RowLayout(1), RowLayout(2)))
    assert [b - a for a, b in zip(first, second, strict=True)] == [16] * rows
    taken = sorted(first + second)
    assert len(set(taken)) == 2 * rows
    if rows % 16 == 0:
        assert taken == list(range(2 * rows))
    assert [kernels.packed_row(RowLayout.PLAIN, 7, i) for i in range(3)] == [7, 8, 9]
