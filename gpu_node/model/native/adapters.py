"""Adapters to what the native kernels add to their products."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.checkpoint import Checkpoint
from penstock.gpu_node.model.description import Description
from penstock.gpu_node.model.low_rank import LowRank
from penstock.gpu_node.model.protocol import Adapter
from penstock.gpu_node.model.spec import MatrixName
from penstock.gpu_node.model.tensors import DecoderTensors
from penstock.kernels.cpu.library import LowRankRows, NativeModel, Place, Slot

_SLOTS: dict[MatrixName, Slot] = {"qkv": Slot.QKV, "out": Slot.OUT, "mlp_in": Slot.MLP_IN, "mlp_out": Slot.MLP_OUT}


class NativeAdapters:
    """Hands them over as `Packer` hands over the matrices that they go beside."""

    def __init__(self, model: NativeModel, described: Description, *, turned: bool) -> None:
        self._model = model
        self._spec = described.spec
        self._source = described.source
        self._turned = turned

    def set(self, place: int, adapter: Adapter) -> None:
        """Put an adapter in a place; no step may be running."""
        tensors = DecoderTensors(Checkpoint.open(self._source), self._spec) if self._turned else None
        for layer in range(self._spec.num_layers):
            for matrix, slot in _SLOTS.items():
                parts = adapter.low_ranks(layer, matrix)
                gains = _gains(tensors, layer, matrix) if tensors is not None and parts else None
                self._model.set_adapter(place, slot, layer, [self._part(matrix, part) for part in parts], gains)

    def _part(self, matrix: MatrixName, part: LowRank) -> LowRankRows:
        place, first = Place.PLAIN, sum(rows for _, rows in self._spec.parts_of(matrix)[: part.part])
        if matrix == "mlp_in" and self._spec.is_gated:
            place, first = (Place.FIRST_HALF, Place.SECOND_HALF)[part.part], 0
        return LowRankRows(place, first, np.ascontiguousarray(part.down), np.ascontiguousarray(part.up))


def _gains(tensors: DecoderTensors, layer: int, matrix: MatrixName) -> NDArray[np.float32] | None:
    """The weights of the norm before a matrix, which a turned model has in the matrix."""
    if matrix not in ("qkv", "mlp_in"):
        return None
    norm = tensors.mlp_norm(layer) if matrix == "mlp_in" else None
    return (norm or tensors.attention_norm(layer)).weight.to_float32()
