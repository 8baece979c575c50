"""Copies of blocks happen as if one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes.cover import examples

from penstock.kernels.reference import layers as reference
from penstock.kernels.triton.copies import copy_blocks

NUM_BLOCKS, NUM_NEAR, NUM_BYTES = 7, 4, 20


@pytest.mark.parametrize("seed", range(examples(25)))
def test_a_later_copy_sees_an_earlier_one_in_either_memory(seed: int, device: torch.device) -> None:
    rng = np.random.default_rng(seed)
    copies = rng.integers(0, NUM_BLOCKS, (rng.integers(0, 9), 2), dtype=np.int32)
    pool = torch.randint(0, 256, (NUM_BLOCKS, NUM_BYTES), dtype=torch.uint8)
    near, far = pool[:NUM_NEAR].to(device, copy=True), pool[NUM_NEAR:].clone()
    if device.type == "cuda":
        far = far.pin_memory()
    jump = far.data_ptr() - near.data_ptr() - near.nbytes
    copy_blocks(near, copies, host_from=NUM_NEAR, host_jump=jump)
    if device.type == "cuda":
        torch.cuda.synchronize()
    reference.copy_blocks(pool, torch.from_numpy(copies))
    assert torch.equal(torch.cat((near.cpu(), far)), pool)
