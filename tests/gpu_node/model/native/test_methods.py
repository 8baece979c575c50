"""Quantized checkpoints on the native kernels: as they are stored, else in groups of int8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.plans import logits_alone
from fixtures.quantized_checkpoint import LAYOUTS, TOKEN_IDS
from numpy.typing import NDArray

from penstock.gpu_node.model.native.runner import NativeRunner

Quantized = Callable[[str, str], tuple[Path, NDArray[Any]]]


MOST = {"llama": 0.09, "gpt-neox": 0.035}
"""Errors by the logits' spread; those of the one are of wider scores."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", MOST)
def test_logits_err_by_the_rounding_of_activations_only(
    quantized: Quantized, load_native: Callable[..., NativeRunner], family: str, layout: str
) -> None:
    folder, want = quantized(family, layout)
    got = logits_alone(load_native(folder, quantization="auto", num_kv_blocks=8), TOKEN_IDS)
    assert np.sqrt(np.square(got - want).mean()) < MOST[family] * want.std()


def test_experts_in_mxfp4_stay_as_they_are_stored(
    mxfp4_model: tuple[Path, NDArray[Any]], load_native: Callable[..., NativeRunner]
) -> None:
    folder, want = mxfp4_model
    runner = load_native(folder, quantization="auto", num_kv_blocks=8, max_model_len=128)
    # Of 32 numbers: an exponent and 16 bytes. All else has 16 bits, in rows that fill panels.
    experts, others = 4 * 6 * 3 * 64 * 64, 4 * (256 + 128) * 64 + 2 * 384 * 64
    assert runner.placement.weight_bytes == experts // 32 * 17 + 2 * others
    errors = np.sqrt(np.square(logits_alone(runner, TOKEN_IDS) - want).mean(axis=1)) / want.std()
    # Near a tie of the router's scores, rounding chooses other experts: not in four of five tokens.
    assert np.quantile(errors, 0.8) < 0.06
