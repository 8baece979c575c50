"""Philox4x32-10, the counter-based random generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Run ten rounds of Philox on each row.

    counter: [n, 4], key: [n, 2]; returns [n, 4] words, each uniform over 32 bits.
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[:, i].astype(np.uint64) for i in range(2))
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c2 = (product_1 >> _SHIFT_32) ^ c1 ^ k0, (product_0 >> _SHIFT_32) ^ c3 ^ k1
        c1, c3 = product_1 & _LOW_32, product_0 & _LOW_32
        k0, k1 = (k0 + _WEYL_0) & _LOW_32, (k1 + _WEYL_1) & _LOW_32
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def sampling_uniform(
    seed: NDArray[np.uint64], choice: NDArray[np.int32], position: NDArray[np.int32], *, draw: int = 0
) -> NDArray[np.float64]:
    """Return the random number in [0, 1), with 53 bits, for (seed, choice, position, draw).

    seed, choice, position: [n]; returns [n]. It depends on nothing else, so a resumed choice draws the same numbers.
    """
    counter = np.zeros((len(seed), 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1], counter[:, 2] = position, choice, draw
    key = np.stack((seed & _LOW_32, seed >> _SHIFT_32), axis=1).astype(np.uint32)
    words = philox4x32(counter, key)[:, :2].astype(np.uint64)
    bits = (words[:, 1] << _SHIFT_32) | words[:, 0]
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
