"""Both layouts of the KV cache hold the same keys and values, wherever blocks are copied."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bench_gpu.models import Options, make_model, spec_of
from bench_gpu.plans import plan_of
from numpy.typing import NDArray
from torch import Tensor

from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.kv_pool import KvLayout, KvPool

NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 5, 4
HOST = NUM_DEVICE_BLOCKS + 1


def parts(pool: KvPool) -> list[Tensor]:
    """The arrays of all layers, each [heads, blocks, ...]."""
    arrays = [(layer.k, layer.v, layer.k_scales, layer.v_scales) for layer in pool.layers]
    return [array for some in arrays for array in some if array is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("by_layer", [False, True])
def test_copies_move_whole_blocks_and_no_others(by_layer: bool, dtype: torch.dtype, device: Device) -> None:
    layout = KvLayout(spec_of("tiny"), 16, dtype, by_layer=by_layer)
    pool = KvPool(layout, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS, device)
    for i, array in enumerate(parts(pool)):
        numbers = torch.arange(array.numel()).view(array.shape) + 31 * i
        array.copy_((numbers % 113).to(array.dtype))
    # Of each block, the numbers that it holds: at first its own.
    held = {block: block for block in range(HOST + NUM_HOST_BLOCKS)}
    want = [array.clone() for array in parts(pool)]
    copies = [
        [1, 2],
        [2, HOST],
        [3, HOST + 3],
        [HOST, 4],
        [4, 5],
        [5, 1],
        [HOST + 3, 2],
        [HOST, HOST + 1],
        [HOST + 1, 3],
    ]
    pool.copy(np.array(copies, np.int32))
    for source, target in copies:
        held[target] = held[source]
    for array, first in zip(parts(pool), want, strict=True):
        for block in range(HOST):
            assert torch.equal(array[:, block], first[:, held[block]])


def outputs(device: Device, *, by_layer: bool) -> list[NDArray[np.int32]]:
    """The tokens of a prompt and of two steps after it, and logits of the last one."""
    torch.manual_seed(0)
    options = Options(dtype=torch.float32, max_model_len=64, num_blocks=8, max_num_seqs=2, by_layer=by_layer)
    model = make_model("tiny", spec_of("tiny"), device, options)
    tables = np.array([[3, 1], [6, 2]], np.int32)
    prompts, none = [np.arange(20, dtype=np.int32), np.arange(7, dtype=np.int32)], np.zeros(2, np.int64)
    found = [model.runner.submit(plan_of(prompts, none, tables, np.arange(2))).result().tokens]
    for at in range(2):
        later = [np.array([token], np.int32) for token in found[-1].tolist()]
        plan = plan_of(later, np.array([20, 7]) + at, tables, np.arange(2))
        found.append(model.runner.submit(plan).result().tokens)
    return found


def test_a_model_computes_the_same_in_both_layouts(device: Device) -> None:
    for one, other in zip(outputs(device, by_layer=False), outputs(device, by_layer=True), strict=True):
        np.testing.assert_array_equal(one, other)
