"""Steps as CUDA graphs: one per shape, captured at start and replayed with sampling included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.graph_shapes import GraphShapes, StepShape, blank_step
from penstock.gpu_node.model.gpu.inputs import Ints, StepInputs, aligned, size_of, to_device
from penstock.gpu_node.model.gpu.linear import padded_vocab

Compute = Callable[[StepInputs[Tensor]], Tensor]
"""Runs a step and returns its logits. Stores the tokens of rows without penalties or masks for the next step."""


class StepGraphs:
    """The CUDA graphs of one decoder. All of them read a step from one device buffer."""

    def __init__(
        self, device: Device, compute: Compute, shapes: GraphShapes, max_blocks: int, logits: tuple[int, torch.dtype]
    ) -> None:
        """max_blocks: KV blocks of one sequence; logits: the vocabulary size and the dtype of logits."""
        self._shapes = shapes
        # Rows of whole lines of memory, as the head's product has them.
        padded = torch.zeros(shapes.max_rows, padded_vocab(logits[0]), dtype=logits[1], device=device.torch)
        self._logits = padded[:, : logits[0]]
        self._tables = torch.zeros(shapes.max_rows, max_blocks, dtype=torch.int32, device=device.torch)
        capacity = max(size_of(blank_step(shape)) for shape in shapes.all) + aligned(shapes.max_rows * max_blocks)
        self._inputs = torch.zeros(capacity, dtype=torch.int32, device=device.torch)
        self._replays: dict[StepShape, Callable[[], None]] = {}
        pool = None
        # The largest first: its memory pool is large enough for all other graphs.
        for shape in shapes.all:
            blank = blank_step(shape)
            packed = device.pinned(size_of(blank), dtype=torch.int32)
            step = replace(to_device(packed, self._inputs, blank), block_tables=self._tables[: shape.num_seqs])
            self._replays[shape], pool = device.capture(self._work(compute, step), pool)

    def find(self, step: StepInputs[Ints]) -> StepShape | str:
        """Return the shape of the graph that can run a packed step, or the reason why none can."""
        return self._shapes.find(step)

    def run(self, packed: Tensor, step: StepInputs[Ints], shape: StepShape) -> Tensor:
        """Replay the graph of a step that is padded to `shape`; return its logits, which the next replay overwrites.

        packed: a pinned staging buffer for the step.
        """
        tables = to_device(packed, self._inputs, step).block_tables
        self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
        self._replays[shape]()
        return self._logits

    def _work(self, compute: Compute, step: StepInputs[Tensor]) -> Callable[[], None]:
        kept = self._logits[: len(step.rules)]

        def work() -> None:
            # All graphs share one memory pool, so results that outlive a replay are copied out of it.
            kept.copy_(compute(step))

        return work
