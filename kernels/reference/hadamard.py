"""Orthogonal matrices that spread the outliers of a few channels over all channels (QuaRot, arXiv:2404.00456)."""

from __future__ import annotations

import numpy as np

from penstock.kernels.reference.quantized import Floats


def hadamard_rotation(count: int) -> Floats:
    """Return the rotation of 2^k * m numbers: a Hadamard matrix over runs of 2^k, a DCT-II over the m runs."""
    hadamard = np.ones((1, 1))
    while count % (2 * len(hadamard)) == 0:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    num_runs = count // len(hadamard)
    wave, run = np.arange(num_runs)[:, None], np.arange(num_runs)
    cosines = np.sqrt(np.where(wave == 0, 1, 2) / count) * np.cos(np.pi * wave * (run + 0.5) / num_runs)
    matrix: Floats = np.kron(cosines, hadamard).astype(np.float32)
    return matrix
