"""LoRA adapters on a GPU: one table per matrix holds all adapter slots, and a Triton kernel multiplies with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.gpu_node.model.architecture.spec import LayerSpec, ModelSpec
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.inputs import StepInputs
from penstock.gpu_node.model.protocol import Adapter, MatrixName
from penstock.kernels.triton.lora import add_lora


@dataclass(frozen=True, slots=True)
class _Table:
    """The adapters of one matrix, zero where an adapter adds nothing.

    down: [slots, ranks of all parts, in]; up: [slots, out, ranks of all parts].
    """

    down: Tensor
    up: Tensor


_Tables: TypeAlias = dict[tuple[int, MatrixName], _Table]


@dataclass(frozen=True, slots=True)
class AdaptedTiles:
    """The adapters of a step's rows, in tiles of rows with the same adapter."""

    tables: _Tables
    tiles: Tensor | None
    tiles_at_samples: Tensor | None

    def add(self, layer: int, matrix: MatrixName, x: Tensor, out: Tensor) -> Tensor:
        """Add the adapters' products to the rows that have one, in place. x: [rows, in]; out: [rows, out]."""
        if self.tiles is not None:
            table = self.tables[layer, matrix]
            add_lora(out, x, table.down, table.up, self.tiles)
        return out

    def at_samples(self) -> AdaptedTiles:
        """Return the adapters of only those rows whose logits are computed."""
        return AdaptedTiles(self.tables, self.tiles_at_samples, self.tiles_at_samples)


NOT_ADAPTED = AdaptedTiles({}, None, None)
"""The adapters of a step in which no sequence has one."""


class GpuAdapters:
    """The adapters that are loaded into a runner's adapter slots."""

    def __init__(self, spec: ModelSpec, num_slots: int, max_rank: int, dtype: torch.dtype, device: Device) -> None:
        """device: one with an unused side stream, which adapters are copied on."""
        self.num_slots = num_slots
        self._spec = spec
        self._max_rank = max_rank
        self._device = device
        self._tables = {
            (at, matrix): self._table(layer, matrix, num_slots, dtype)
            for at, layer in enumerate(spec.layers if num_slots else ())
            for matrix in layer.adapted_matrices
        }
        numbers_of = Counter[int]()
        for (at, _), table in self._tables.items():
            numbers_of[at] += table.down[0].numel() + table.up[0].numel()
        numbers = max(numbers_of.values(), default=0)
        # Two: the host fills one with a layer while the other one is copied.
        self._staged = [(device.pinned(numbers, dtype=dtype), device.record_event()) for _ in range(2)]

    def set(self, adapter_slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot, after the steps that were already submitted and before all later ones.

        The copies run on the side stream from two pinned buffers. The calling thread fills both at once. From the
        third layer on, it waits for the steps in flight, and then for copies.
        """
        unused = self._device.record_event()
        with self._device.on_side():
            unused.hold()
            for layer in range(self._spec.num_layers if self._tables else 0):
                staged, copied = self._staged[layer % 2]
                copied.wait()
                self._copy_layer(staged, layer, adapter_slot, adapter)
                self._staged[layer % 2] = staged, self._device.record_event()
            loaded = self._device.record_event()
        loaded.hold()

    def _copy_layer(self, staged: Tensor, layer: int, adapter_slot: int, adapter: Adapter) -> None:
        """Start copying one layer's part of an adapter through `staged`, pinned and flat."""
        at = 0
        spec = self._spec.layers[layer]
        for matrix in spec.adapted_matrices:
            table = self._tables[layer, matrix]
            halves: list[Tensor] = []
            for target in (table.down[adapter_slot], table.up[adapter_slot]):
                halves.append(staged[at : at + target.numel()].view(target.shape).zero_())
                at += target.numel()
            down, up = halves
            firsts = list(accumulate((rows for _, rows in self._spec.parts_of(spec, matrix)), initial=0))
            for part in adapter.low_ranks(layer, matrix):
                (rows, rank), rank_at, first = part.up.shape, self._max_rank * part.part, firsts[part.part]
                down[rank_at : rank_at + rank] = torch.from_numpy(part.down)
                up[first : first + rows, rank_at : rank_at + rank] = torch.from_numpy(part.up)
            table.down[adapter_slot].copy_(down, non_blocking=True)
            table.up[adapter_slot].copy_(up, non_blocking=True)

    def compile(self) -> None:
        """Compile the adapter kernels for the rank of each kind of matrix by running them on a dummy row."""
        tile = torch.tensor([[0, 0, 1]], dtype=torch.int32, device=self._device.torch)
        layers = self._spec.layers
        for (at, matrix), table in self._tables.items():
            if layers.index(layers[at]) == at:
                out, x = (table.down.new_zeros(1, size) for size in (table.up.shape[1], table.down.shape[2]))
                out = out.float() if matrix == "gates" else out
                add_lora(out, x, table.down, table.up, tile)

    def rows_of(self, step: StepInputs[Tensor]) -> AdaptedTiles:
        """Return the adapter of each row of a step."""
        if not len(step.adapter_tiles):
            return NOT_ADAPTED
        return AdaptedTiles(self._tables, step.adapter_tiles, step.sampled_adapter_tiles)

    def _table(self, layer: LayerSpec, matrix: MatrixName, num_slots: int, dtype: torch.dtype) -> _Table:
        parts = self._spec.parts_of(layer, matrix)
        ranks, rows = self._max_rank * len(parts), sum(rows for _, rows in parts)
        shapes = (num_slots, ranks, self._spec.columns_of(layer, matrix)), (num_slots, rows, ranks)
        down, up = (torch.zeros(shape, dtype=dtype, device=self._device.torch) for shape in shapes)
        return _Table(down, up)
