"""Decode steps as graphs: one for each of a few batch sizes, captured once and replayed with sampling inside."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.inputs import Ints, StepInputs, aligned, pad_decode, size_of, to_device
from penstock.kernels.triton.sampler import RULE_COLUMNS

Compute = Callable[[StepInputs[Tensor]], Tensor]
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
        room = size_of(blank) + aligned(most * max_blocks)
        self._arrival = torch.zeros(room, dtype=torch.int32, device=device.torch)
        self._replays: dict[int, Callable[[], None]] = {}
        pool = None
        # The largest first: the memory that it takes is enough for all others.
        for size in reversed(self._sizes):
            packed = device.pinned(size_of(blank), dtype=torch.int32)
            step = replace(to_device(packed, self._arrival, _blank(size)), block_tables=self._tables[:size])
            self._replays[size], pool = device.capture(self._work(compute, step), pool)

    def can_run(self, step: StepInputs[Ints]) -> bool:
        """Whether every sequence of a packed step decodes and samples, no token is only scored, and none is adapted.

        A graph knows of no adapters: who has none would pay for them.
        """
        num_seqs = len(step.context_lens)
        decodes = len(step.token_ids) == num_seqs == len(step.sampling) == len(step.rules)
        return decodes and num_seqs <= self._sizes[-1] and not len(step.adapter_tiles)

    def padded(self, step: StepInputs[Ints]) -> StepInputs[Ints]:
        """A packed step as `run` takes it."""
        return pad_decode(step, self._sizes[bisect_left(self._sizes, len(step.token_ids))])

    def run(self, packed: Tensor, step: StepInputs[Ints]) -> Tensor:
        """Replay the graph of a padded step, `packed` being pinned memory for it; its logits, until the next replay."""
        tables = to_device(packed, self._arrival, step).block_tables
        self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
        self._replays[len(step.token_ids)]()
        return self._logits

    def _work(self, compute: Compute, step: StepInputs[Tensor]) -> Callable[[], None]:
        kept = self._logits[: len(step.rules)]

        def work() -> None:
            # All graphs share the memory that they compute in: what is to outlive a replay has a place of its own.
            kept.copy_(compute(step))

        return work


def _blank(num_rows: int) -> StepInputs[Ints]:
    """A padded step of nothing but padding."""
    widths = {"tiles": 2, "rules": len(RULE_COLUMNS), "adapter_tiles": 3, "sampled_adapter_tiles": 3, "block_tables": 1}
    shapes = {field.name: (0, widths[field.name]) if field.name in widths else 0 for field in fields(StepInputs)}
    return pad_decode(StepInputs(**{name: np.zeros(shape, np.int32) for name, shape in shapes.items()}), num_rows)
