"""Functions of vectors and rows, sixteen lanes at a time, against float64 and references."""

from __future__ import annotations

from functools import cache
from math import erf

import numpy as np
import pytest
import torch
from fakes.single_kernels import Floats, Single

from penstock.kernels.reference.layers import layer_norm, rms_norm
from penstock.kernels.reference.products import hadamard_rotation


def test_the_exponential_is_as_precise_as_it_says(kernels: Single) -> None:
    x = np.concatenate((np.linspace(-87, 0, 400_001), -np.geomspace(1e-30, 1, 10_000))).astype(np.float32)
    want = np.exp(x.astype(np.float64))
    assert (np.abs(kernels.exp_of_negative(x) - want) / want <= 3e-7 + 8e-8 * np.abs(x)).all()
    assert kernels.exp_of_negative(np.zeros(5, np.float32)).tolist() == [1.0] * 5


def test_exponential_of_very_negative_numbers_is_almost_zero_and_keeps_nan(kernels: Single) -> None:
    low = kernels.exp_of_negative(np.array([-88, -1e4, -3e38, -np.inf], np.float32))
    assert (low >= 0).all() and (low < 2e-38).all()
    assert np.isnan(kernels.exp_of_negative(np.array([np.nan], np.float32))).all()


def test_silu_is_as_precise_as_its_exponential(kernels: Single) -> None:
    x = np.concatenate((np.linspace(-86, 100, 300_001), np.geomspace(1e-30, 1e30, 10_000))).astype(np.float32)
    wide = x.astype(np.float64)
    want = wide / (1 + np.exp(-wide))
    assert (np.abs(kernels.silu(x) - want) <= (5e-7 + 8e-8 * np.maximum(-x, 0)) * np.abs(want)).all()


@pytest.mark.parametrize("count", [1, 15, 16, 17])
def test_silu_of_extremes(kernels: Single, count: int) -> None:
    assert (kernels.silu(np.full(count, 3e38, np.float32)) == np.float32(3e38)).all()
    assert (np.abs(kernels.silu(np.full(count, -1e4, np.float32))) < 1e-30).all()
    assert np.isnan(kernels.silu(np.full(count, np.nan, np.float32))).all()
    assert (kernels.silu(np.full(count, np.inf, np.float32)) == np.inf).all()
    assert (kernels.silu(np.zeros(count, np.float32)) == 0).all()


@pytest.mark.parametrize("is_tanh", [False, True])
def test_gelu_is_within_a_few_millionths(kernels: Single, is_tanh: bool) -> None:
    x = np.concatenate((np.linspace(-12, 12, 60_001), np.geomspace(1e-30, 1e12, 1000))).astype(np.float32)
    wide = x.astype(np.float64)
    share = 0.5 * (1 + np.tanh((2 / np.pi) ** 0.5 * (wide + 0.044715 * wide**3)))
    if not is_tanh:
        share = 0.5 * (1 + np.array([erf(value) for value in wide * 0.5**0.5]))
    assert (np.abs(kernels.gelu(x, is_tanh=is_tanh) - wide * share) <= 1e-6 * np.abs(wide)).all()
    assert kernels.gelu(np.zeros(3, np.float32), is_tanh=is_tanh).tolist() == [0.0] * 3
    assert np.isnan(kernels.gelu(np.array([np.nan], np.float32), is_tanh=is_tanh)).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("count", [1, 15, 16, 33, 576])
def test_norm_equals_the_reference(kernels: Single, count: int, has_bias: bool) -> None:
    rng = np.random.default_rng(count)
    row, weight, bias = (rng.standard_normal(count).astype(np.float32) for _ in range(3))
    row = row * np.float32(3) + np.float32(5)
    got, finite = kernels.norm(row, weight, bias if has_bias else None, 1e-5)
    np.testing.assert_allclose(got[:count], _norm(row, weight, bias if has_bias else None, 1e-5), atol=1e-5, rtol=1e-5)
    assert finite and not got[count:].any()
    for odd in (np.nan, np.inf, -np.inf):
        row[count // 2] = odd
        assert not kernels.norm(row, weight, bias if has_bias else None, 1e-5)[1]


def _norm(row: Floats, weight: Floats, bias: Floats | None, eps: float) -> Floats:
    x, factors = torch.from_numpy(row), torch.from_numpy(weight)
    if bias is None:
        return np.asarray(rms_norm(x, factors, eps))
    return np.asarray(layer_norm(x, factors, torch.from_numpy(bias), eps))


ROTATED = (1, 2, 4, 8, 16, 24, 33, 40, 96, 576, 1536, 2048)
rotation = cache(hadamard_rotation)


@pytest.mark.parametrize("count", ROTATED)
def test_a_rotation_is_an_orthogonal_matrix(count: int) -> None:
    matrix = rotation(count)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(count), atol=3e-6)


@pytest.mark.parametrize("count", ROTATED)
def test_a_row_is_rotated_by_the_references_matrix(kernels: Single, count: int) -> None:
    matrix = rotation(count)
    row = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    rotated = kernels.hadamard_rotation(row)
    np.testing.assert_allclose(rotated[:count], matrix @ row, atol=2e-6 * count**0.5)
    assert not rotated[count:].any()


def test_a_rotation_spreads_an_outlier_and_a_nan(kernels: Single) -> None:
    row = np.zeros(576, np.float32)
    row[100] = 1000
    assert np.abs(kernels.hadamard_rotation(row)).max() < 1000 * (2 / 576) ** 0.5 + 1e-3
    row[100] = np.nan
    assert np.isnan(kernels.hadamard_rotation(row)).all()
