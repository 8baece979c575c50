"""Blocks are not cleared between sequences: what an earlier one left in them must not reach a later one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fakes.cover import each_value
from fakes.runners.runner_options import runner_options
from fakes.runners.stale_blocks import NUM_BLOCKS, logits_over

from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.torch_cpu.runner import TorchRunner


@pytest.mark.parametrize(("block_size", "dtype"), each_value([8, 16, 32], ["float32", "bfloat16"]))
def test_nonfinite_values_in_stale_blocks_reach_no_other_sequence(
    tiny_model: Path, block_size: int, dtype: str
) -> None:
    options = runner_options(block_size=block_size, num_kv_blocks=NUM_BLOCKS, dtype=dtype)
    runner = load_model(str(tiny_model), options, lambda *_: None).runner
    assert isinstance(runner, TorchRunner)

    def fill(number: float, blocks: Sequence[int]) -> None:
        for cache in runner._caches:
            cache.k[:, blocks] = cache.v[:, blocks] = number

    for length in (1, 7, 8, 9, 16, 17, 20):
        for chunk in {1, 3, length}:
            given = {"block_size": block_size, "length": length, "chunk": chunk}
            want = logits_over(runner, partial(fill, 0.0), **given)
            assert np.isfinite(want).all()
            # Infinity can only come through where NaN can; one way of cutting the prompt shows that for each length.
            for odd in (np.nan, np.inf, -np.inf) if chunk == min(3, length) else (np.nan,):
                got = logits_over(runner, partial(fill, odd), **given)
                np.testing.assert_array_equal(got, want)
