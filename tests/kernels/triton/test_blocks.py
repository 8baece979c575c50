"""Copies of blocks happen as if one after the other."""

from __future__ import annotations

import numpy as np
import torch
from fakes.cover import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.reference import attention as reference
from penstock.kernels.triton.blocks import copy_blocks

NUM_BLOCKS, NUM_NEAR, NUM_BYTES = 7, 4, 20


@settings(max_examples=examples(25))
@given(copies=st.lists(st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_BLOCKS - 1)), max_size=8))
def test_a_later_copy_sees_an_earlier_one_in_either_memory(copies: list[tuple[int, int]], device: torch.device) -> None:
    pool = torch.randint(0, 256, (NUM_BLOCKS, NUM_BYTES), dtype=torch.uint8)
    near, far = pool[:NUM_NEAR].to(device, copy=True), pool[NUM_NEAR:].clone()
    if device.type == "cuda":
        far = far.pin_memory()
    jump = far.data_ptr() - near.data_ptr() - near.nbytes
    copy_blocks(near, np.array(copies, np.int32).reshape(-1, 2), host_from=NUM_NEAR, host_jump=jump)
    if device.type == "cuda":
        torch.cuda.synchronize()
    reference.copy_blocks(pool, torch.tensor(copies).reshape(-1, 2))
    assert torch.equal(torch.cat((near.cpu(), far)), pool)
