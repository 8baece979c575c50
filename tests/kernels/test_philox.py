"""Philox against the vectors that its authors publish with Random123 (kat_vectors, philox4x32 10)."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.kernels.philox import philox4x32, sampling_uniform

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    got = philox4x32(np.array([counter] * 2, dtype=np.uint32), np.array([key] * 2, dtype=np.uint32))
    assert got.tolist() == [list(words)] * 2


def _uniform(seed: int, choice: int, position: int, draw: int = 0) -> float:
    one = sampling_uniform(
        np.array([seed], dtype=np.uint64), np.array([choice], np.int32), np.array([position], np.int32), draw=draw
    )
    return float(one[0])


def test_seed_choice_position_and_draw_each_change_the_number() -> None:
    names = [(1, 0, 0, 0), (1 << 40, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), ((1 << 64) - 1, 0, 0, 0)]
    numbers = [_uniform(*name) for name in names]
    assert len(set(numbers)) == len(names)
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert numbers == [_uniform(*name) for name in names]


def test_numbers_are_uniform() -> None:
    n = 20_000
    numbers = sampling_uniform(np.full(n, 7, np.uint64), np.zeros(n, np.int32), np.arange(n, dtype=np.int32))
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    chi_square = float(((counts - n / 20) ** 2 / (n / 20)).sum())
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
