"""Decode steps as CUDA graphs: one per batch size bucket, captured at start and replayed with sampling included."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.inputs import Ints, StepInputs, aligned, pad_decode, size_of, to_device
from penstock.gpu_node.model.gpu.linear import HEAD_ROWS
from penstock.kernels.triton.sampler import RULE_COLUMNS

Compute = Callable[[StepInputs[Tensor]], Tensor]
"""Runs a step and returns its logits. Stores the tokens of rows without penalties or masks for the next step."""


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes with a graph: 1, 2, 4, 8, then multiples of 16 up to 256, then of 32.

    The last one is the first that holds `max_num_seqs`.
    """
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, max(max_num_seqs, 256) + 32, 32)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


class DecodeGraphs:
    """The CUDA graphs of one decoder. All of them read a step from one device buffer."""

    def __init__(
        self, device: Device, compute: Compute, max_num_seqs: int, max_blocks: int, logits: tuple[int, torch.dtype]
    ) -> None:
        """max_blocks: KV blocks of one sequence; logits: the vocabulary size and the dtype of logits."""
        self._sizes = bucket_sizes(max_num_seqs)
        max_rows = self._sizes[-1]
        # Rows of whole lines of memory, as the head's product has them.
        width = -(-logits[0] // HEAD_ROWS) * HEAD_ROWS
        self._logits = torch.zeros(max_rows, width, dtype=logits[1], device=device.torch)[:, : logits[0]]
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device.torch)
        blank = _blank(max_rows)
        capacity = size_of(blank) + aligned(max_rows * max_blocks)
        self._inputs = torch.zeros(capacity, dtype=torch.int32, device=device.torch)
        self._replays: dict[int, Callable[[], None]] = {}
        pool = None
        # The largest first: its memory pool is large enough for all other graphs.
        for size in reversed(self._sizes):
            packed = device.pinned(size_of(blank), dtype=torch.int32)
            step = replace(to_device(packed, self._inputs, _blank(size)), block_tables=self._tables[:size])
            self._replays[size], pool = device.capture(self._work(compute, step), pool)

    def can_run(self, step: StepInputs[Ints]) -> bool:
        """Return whether a graph can run a packed step.

        In such a step every sequence decodes one token and samples, no token is only scored, and no sequence has an
        adapter. Graphs omit the adapter kernels, so that steps without adapters do not pay for them.
        """
        num_seqs = len(step.context_lens)
        decodes = len(step.token_ids) == num_seqs == len(step.sampling) == len(step.rules)
        return decodes and num_seqs <= self._sizes[-1] and not len(step.adapter_tiles)

    def padded(self, step: StepInputs[Ints]) -> StepInputs[Ints]:
        """Pad a packed step to the next batch size with a graph, as `run` expects it."""
        return pad_decode(step, self._sizes[bisect_left(self._sizes, len(step.token_ids))])

    def run(self, packed: Tensor, step: StepInputs[Ints]) -> Tensor:
        """Replay the graph of a padded step and return its logits, which the next replay overwrites.

        packed: a pinned staging buffer for the step.
        """
        tables = to_device(packed, self._inputs, step).block_tables
        self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
        self._replays[len(step.token_ids)]()
        return self._logits

    def _work(self, compute: Compute, step: StepInputs[Tensor]) -> Callable[[], None]:
        kept = self._logits[: len(step.rules)]

        def work() -> None:
            # All graphs share one memory pool, so results that outlive a replay are copied out of it.
            kept.copy_(compute(step))

        return work


def _blank(num_rows: int) -> StepInputs[Ints]:
    """Return a step of `num_rows` padding rows."""
    widths = {"tiles": 2, "rules": len(RULE_COLUMNS), "adapter_tiles": 3, "sampled_adapter_tiles": 3, "block_tables": 1}
    shapes = {field.name: (0, widths[field.name]) if field.name in widths else 0 for field in fields(StepInputs)}
    return pad_decode(StepInputs(**{name: np.zeros(shape, np.int32) for name, shape in shapes.items()}), num_rows)
