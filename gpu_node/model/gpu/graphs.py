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

Compute = Callable[[StepInputs], Tensor]
"""Runs a step, leaves the tokens that rows choose by their logits alone where the next one finds them; the logits."""


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then steps of 16 to 256 and of 32 behind, up to the first that holds `max_num_seqs`."""
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, max(max_num_seqs, 256) + 32, 32)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


class DecodeGraphs:
    """Graphs of one decoder, over one place in the device's memory that steps are copied to."""

    def __init__(
        self, device: Device, compute: Compute, max_num_seqs: int, max_blocks: int, logits: tuple[int, torch.dtype]
    ) -> None:
        """max_blocks: of a sequence; logits: how many there are of a row, and of what kind."""
        self._sizes = bucket_sizes(max_num_seqs)
        most = self._sizes[-1]
        self._logits = torch.zeros(most, logits[0], dtype=logits[1], device=device.torch)
        self._tables = torch.zeros(most, max_blocks, dtype=torch.int32, device=device.torch)
        blank = _blank(most)
        self._arrival = torch.zeros(size_of(blank) + most * max_blocks, dtype=torch.int32, device=device.torch)
        self._replays: dict[int, Callable[[], None]] = {}
        pool = None
        # The largest first: the memory that it takes is enough for all others.
        for size in reversed(self._sizes):
            packed = device.pinned(size_of(blank), dtype=torch.int32)
            step = self._step(to_device(packed, self._arrival, _blank(size)))
            self._replays[size], pool = device.capture(self._work(compute, step), pool)

    def can_run(self, arrays: list[Ints]) -> bool:
        """Whether a packed step is one that every sequence decodes and samples in, and no token is only scored."""
        num_seqs = len(arrays[4])
        return len(arrays[0]) == num_seqs == len(arrays[8]) == len(arrays[9]) and num_seqs <= self._sizes[-1]

    def padded(self, arrays: list[Ints]) -> list[Ints]:
        """A packed step as `run` takes it."""
        return pad_decode(arrays, self._sizes[bisect_left(self._sizes, len(arrays[0]))])

    def run(self, packed: Tensor, arrays: list[Ints]) -> Tensor:
        """Replay the graph of a padded step, `packed` being pinned memory for it; its logits, until the next replay."""
        tables = to_device(packed, self._arrival, arrays)[-1]
        self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
        self._replays[len(arrays[0])]()
        return self._logits

    def _work(self, compute: Compute, step: StepInputs) -> Callable[[], None]:
        kept = self._logits[: len(step.rules)]

        def work() -> None:
            # All graphs share the memory that they compute in: what is to outlive a replay has a place of its own.
            kept.copy_(compute(step))

        return work

    def _step(self, views: list[Tensor]) -> StepInputs:
        ids, positions, slots, starts, contexts, decoding, tiles, sampling, rules, _ = views
        tables = self._tables[: len(ids)]
        return StepInputs(ids, positions, slots, starts, contexts, tables, decoding, tiles, sampling, rules)


def _blank(num_rows: int) -> list[Ints]:
    """A padded step of nothing but padding."""
    empty, table = np.zeros(0, np.int32), np.zeros((0, 2), np.int32)
    nothing = [*(empty,) * 5, table, empty, table, empty, np.zeros((0, len(RULE_COLUMNS)), np.int32)]
    return pad_decode(nothing, num_rows)
