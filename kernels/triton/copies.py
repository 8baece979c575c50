"""Copies of whole KV blocks within GPU memory, and to and from pinned host memory; and of host arrays to the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.triton.decode_attention import block_offset


def to_device_async(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return a tensor on the device with the array's contents. The current stream copies it; the host does not wait.

    A copy from pageable memory would make the host wait until the device is idle. torch does not reuse the pinned
    memory before the device has read it. If the device is the CPU, the tensor shares the array's memory.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


_WORDS = 4096


@triton.jit
def _copy(pool, copies, num_words, host_from, host_jump, WORDS: tl.constexpr):
    """Grid [copies, runs of words]."""
    i = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    source, target = tl.load(copies + 2 * tl.program_id(0)), tl.load(copies + 2 * tl.program_id(0) + 1)
    inside = i < num_words
    words = tl.load(pool + block_offset(source, num_words, host_from, host_jump) + i, mask=inside, other=0)
    tl.store(pool + block_offset(target, num_words, host_from, host_jump) + i, words, mask=inside)


def copy_blocks(pool: Tensor, copies: NDArray[np.int32], *, host_from: int = 2**31 - 1, host_jump: int = 0) -> None:
    """Copy blocks in order: a later copy reads what earlier ones wrote.

    pool: [num_blocks, bytes] in uint8, contiguous, bytes a multiple of 4; copies: [n, 2], source and target block.
    Blocks from `host_from` on are `host_jump` bytes after the address that they would have in the pool.
    """
    words = pool.view(torch.int32)
    num_words = words.shape[1]
    for wave in independent_waves(copies):
        grid = (len(wave), triton.cdiv(num_words, _WORDS))
        _copy[grid](words, to_device_async(wave, pool.device), num_words, host_from, host_jump // 4, WORDS=_WORDS)


def independent_waves(copies: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """Split copies into groups: no copy writes a block that another copy of its group reads or writes."""
    waves: list[list[list[int]]] = []
    # By block: the first group that may read it, and the first group that may write it.
    readable: dict[int, int] = {}
    writable: dict[int, int] = {}
    for source, target in copies.tolist():
        wave = max(readable.get(source, 0), writable.get(target, 0))
        waves += [[]] if wave == len(waves) else []
        waves[wave].append([source, target])
        readable[target] = wave + 1
        writable[target] = wave + 1
        writable[source] = max(writable.get(source, 0), wave + 1)
    return [np.array(wave, np.int32) for wave in waves]
