"""Blocks are not cleared between sequences: old contents must not affect a later sequence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.cover import each_value
from fakes.runners.runner_options import runner_options
from fakes.runners.stale_blocks import NUM_BLOCKS, logits_over

from penstock.gpu_node.model.gpu.runner import GpuRunner
from penstock.gpu_node.model.loading.load import load_model

BLOCK_SIZE = 8
NAN_BYTE = 255
"""A block of this byte holds NaN in every type of the KV cache and in the scales of int8."""


def _runner(folder: Path, kept: str) -> GpuRunner:
    options = {"runner": "gpu", "block_size": BLOCK_SIZE, "num_kv_blocks": NUM_BLOCKS, "max_model_len": 128}
    runner = load_model(str(folder), runner_options(**options, kv_cache_dtype=kept), lambda *_: None).runner
    assert isinstance(runner, GpuRunner)
    return runner


@pytest.mark.parametrize(("cut", "kept"), each_value([(1, 1), (7, 3), (8, 8), (9, 9)], ["auto", "fp8"]))
def test_nonfinite_values_in_stale_blocks_reach_no_other_sequence(
    tiny_model: Path, cut: tuple[int, int], kept: str
) -> None:
    length, chunk = cut
    runner, given = _runner(tiny_model, kept), {"block_size": BLOCK_SIZE, "length": length, "chunk": chunk}

    def fill_bytes(blocks: Sequence[int], byte: int) -> None:
        runner._pool._device_blocks[:, list(blocks)] = byte

    def fill_infinity(blocks: Sequence[int]) -> None:
        for layer in runner._pool.layers:
            has_scales = layer.k_scales is not None and layer.v_scales is not None
            for numbers in (layer.k_scales, layer.v_scales) if has_scales else (layer.k, layer.v):
                assert numbers is not None
                numbers[:, list(blocks)] = torch.inf

    want = logits_over(runner, lambda blocks: fill_bytes(blocks, 0), **given)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(logits_over(runner, lambda blocks: fill_bytes(blocks, NAN_BYTE), **given), want)
    np.testing.assert_array_equal(logits_over(runner, fill_infinity, **given), want)
