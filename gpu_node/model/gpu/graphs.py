"""Decode steps as graphs: one for each of a few batch sizes, captured once and replayed with sampling inside."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.inputs import Ints, StepInputs, pad_decode, size_of, to_device
from penstock.kernels.triton.sampler import RULE_COLUMNS

Compute = Callable[[StepInputs], None]
"""Runs a step and leaves its tokens where the next one finds them."""


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then steps of 16 to 256 and of 32 behind, up to the first that holds `max_num_seqs`."""
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, max(max_num_seqs, 256) + 32, 32)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


class DecodeGraphs:
    """Graphs of one decoder, over one place in the device's memory that steps are copied to."""

    def __init__(self, device: Device, compute: Compute, max_num_seqs: int, max_blocks: int) -> None:
        """max_blocks: of a sequence."""
        self._sizes = bucket_sizes(max_num_seqs)
        most = self._sizes[-1]
        self._tables = torch.zeros(most, max_blocks, dtype=torch.int32, device=device.torch)
        blank = _blank(most)
        self._arrival = torch.zeros(size_of(blank) + most * max_blocks, dtype=torch.int32, device=device.torch)
        self._replays: dict[int, Callable[[], None]] = {}
        pool = None
        # The largest first: the memory that it takes is enough for all others.
        for size in reversed(self._sizes):
            packed = device.pinned(size_of(blank), dtype=torch.int32)
            step = self._step(to_device(packed, self._arrival, _blank(size)))
            self._replays[size], pool = device.capture(_of(compute, step), pool)

    def can_run(self, arrays: list[Ints]) -> bool:
        """Whether a packed step is one that every sequence decodes and samples in."""
        num_seqs = len(arrays[4])
        return len(arrays[0]) == num_seqs == len(arrays[8]) and num_seqs <= self._sizes[-1]

    def padded(self, arrays: list[Ints]) -> list[Ints]:
        """A packed step as `run` takes it."""
        return pad_decode(arrays, self._sizes[bisect_left(self._sizes, len(arrays[0]))])

    def run(self, packed: Tensor, arrays: list[Ints]) -> None:
        """Replay the graph of a padded step; `packed` is pinned memory for it."""
        tables = to_device(packed, self._arrival, arrays)[-1]
        self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
        self._replays[len(arrays[0])]()

    def _step(self, views: list[Tensor]) -> StepInputs:
        ids, positions, slots, starts, contexts, decoding, tiles, sampling, rules, _ = views
        tables = self._tables[: len(ids)]
        return StepInputs(ids, positions, slots, starts, contexts, tables, decoding, tiles, sampling, rules)


def _of(compute: Compute, step: StepInputs) -> Callable[[], None]:
    return lambda: compute(step)


def _blank(num_rows: int) -> list[Ints]:
    """A padded step of nothing but padding."""
    empty, table = np.zeros(0, np.int32), np.zeros((0, 2), np.int32)
    nothing = [*(empty,) * 5, table, empty, table, empty, np.zeros((0, len(RULE_COLUMNS)), np.int32)]
    return pad_decode(nothing, num_rows)
