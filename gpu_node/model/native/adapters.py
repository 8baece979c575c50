"""Load LoRA adapters into the adapter slots of the native kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.checkpoint.description import Description
from penstock.gpu_node.model.checkpoint.stored_tensors import Checkpoint
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors, StoredNorm
from penstock.gpu_node.model.protocol import Adapter, LowRank, MatrixName
from penstock.kernels.cpu.library import NativeModel, Slot
from penstock.kernels.cpu.structs import LowRankRows, RowLayout

_SLOTS: dict[MatrixName, Slot] = {"qkv": Slot.QKV, "out": Slot.OUT, "mlp_in": Slot.MLP_IN, "mlp_out": Slot.MLP_OUT}


class NativeAdapters:
    """Gives adapters to the native model in the row layout that `Packer` uses for the base matrices."""

    def __init__(self, model: NativeModel, described: Description, *, rotated: bool) -> None:
        self._model = model
        self._spec = described.spec
        self._source = described.source
        self._rotated = rotated

    def set(self, adapter_slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot. No step may be running."""
        for layer in range(self._spec.num_layers):
            for matrix, slot in _SLOTS.items():
                parts = [rows for part in adapter.low_ranks(layer, matrix) for rows in self._rows(matrix, part)]
                gains = self._gains.get((layer, matrix)) if parts else None
                self._model.set_adapter(adapter_slot, slot, layer, parts, gains)

    def _rows(self, matrix: MatrixName, part: LowRank) -> Iterator[LowRankRows]:
        down, up = np.ascontiguousarray(part.down), np.ascontiguousarray(part.up)
        if matrix == "mlp_in" and self._spec.is_gated:
            halves = np.split(up, 2) if self._spec.fused_gate else (up,)
            for half, rows in enumerate(halves, start=part.part):
                yield LowRankRows((RowLayout.FIRST_HALF, RowLayout.SECOND_HALF)[half], 0, down, rows)
            return
        first = sum(rows for _, rows in self._spec.parts_of(matrix)[: part.part])
        yield LowRankRows(RowLayout.PLAIN, first, down, up)

    @cached_property
    def _gains(self) -> dict[tuple[int, MatrixName], NDArray[np.float32]]:
        """The norm weights that a Hadamard-rotated model folds into the next matrix, by layer and matrix.

        They are read once, with the first adapter, because steps wait while an adapter is set.
        """
        if not self._rotated:
            return {}
        tensors = DecoderTensors(Checkpoint.open(self._source), self._spec)
        gains: dict[tuple[int, MatrixName], NDArray[np.float32]] = {}
        for layer in range(self._spec.num_layers):
            norm = tensors.attention_norm(layer)
            norms: dict[MatrixName, StoredNorm | None] = {"qkv": norm, "mlp_in": tensors.mlp_norm(layer) or norm}
            for matrix, own in norms.items():
                if own is not None:
                    gains[layer, matrix] = own.weight.to_float32() + np.float32(self._spec.norm_offset)
        return gains
