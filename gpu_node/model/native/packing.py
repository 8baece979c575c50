"""A checkpoint's tensors to what the kernels read."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.checkpoint import Checkpoint, Stored
from penstock.gpu_node.model.description import Description
from penstock.gpu_node.model.native.formats import format_of, rows_of
from penstock.gpu_node.model.positions import alibi_biases, rope_angles
from penstock.gpu_node.model.source import Progress
from penstock.gpu_node.model.tensors import DecoderTensors, StoredLinear, StoredNorm
from penstock.kernels.cpu.library import Format, NativeModel, Place, Slot, Vector

_CHUNK_TOKENS = 64
"""kChunk of src/attention.h."""
_NORM_BIASES = {
    Vector.ATTENTION_NORM: Vector.ATTENTION_NORM_BIAS,
    Vector.MLP_NORM: Vector.MLP_NORM_BIAS,
    Vector.FINAL_NORM: Vector.FINAL_NORM_BIAS,
}

_Gains: TypeAlias = NDArray[np.float32] | None


class Packer:
    """Lays a model out for the kernels."""

    def __init__(
        self, model: NativeModel, described: Description, quantization: str, progress: Progress, *, turned: bool
    ) -> None:
        self._model = model
        self._spec = described.spec
        self._max_model_len = described.max_model_len
        self._tensors = DecoderTensors(Checkpoint.open(described.source, described.read_scaled), described.spec)
        self._quantization = quantization
        self._turned = turned
        self._progress = progress
        self._formats: set[Format] = set()

    def pack(self) -> set[Format]:
        """All of it; the formats that were used."""
        spec, tensors = self._spec, self._tensors
        for layer in range(spec.num_layers):
            self._pack_layer(layer)
            self._progress("load", (layer + 1) / (spec.num_layers + 1))
        gains = self._set_norm(Vector.FINAL_NORM, 0, tensors.final_norm())
        self._fuse(Slot.HEAD, 0, StoredLinear((tensors.head(),)), gains)
        # Only as long as the norm does not go into the head are tied ones the same.
        if not spec.tied_head or gains is not None:
            self._fuse(Slot.EMBEDDING, 0, StoredLinear((tensors.embedding(),)))
        self._set_positions()
        self._progress("load", 1.0)
        return self._formats

    def _pack_layer(self, layer: int) -> None:
        tensors, attention_norm = self._tensors, self._tensors.attention_norm(layer)
        self._fuse(Slot.QKV, layer, tensors.qkv(layer), self._set_norm(Vector.ATTENTION_NORM, layer, attention_norm))
        for vector, weight in zip((Vector.Q_NORM, Vector.K_NORM), tensors.head_norms(layer) or (), strict=False):
            self._model.set_vector(vector, layer, weight.to_float32())
        self._model.set_window(layer, self._spec.windows[layer] or 0)
        self._fuse(Slot.OUT, layer, tensors.out(layer))
        gains = self._set_norm(Vector.MLP_NORM, layer, tensors.mlp_norm(layer) or attention_norm)
        pack_inner = self._interleave if self._spec.is_gated else self._fuse
        pack_inner(Slot.MLP_IN, layer, tensors.mlp_in(layer), gains)
        self._fuse(Slot.MLP_OUT, layer, tensors.mlp_out(layer))

    def _fuse(self, slot: Slot, layer: int, linear: StoredLinear, gains: _Gains = None) -> None:
        """One matrix with the parts' rows one after the other."""
        firsts = np.cumsum([0, *(part.shape[0] for part in linear.weights)]).tolist()
        self._fill(slot, layer, linear, [(Place.PLAIN, first) for first in firsts[:-1]], gains)

    def _interleave(self, slot: Slot, layer: int, linear: StoredLinear, gains: _Gains) -> None:
        """One matrix in which the rows of two parts alternate by halves of a panel."""
        self._fill(slot, layer, linear, [(Place.FIRST_HALF, 0), (Place.SECOND_HALF, 0)], gains)

    def _fill(
        self, slot: Slot, layer: int, linear: StoredLinear, places: list[tuple[Place, int]], gains: _Gains
    ) -> None:
        self._allocate(slot, layer, linear.weights)
        for part, (place, first) in zip(linear.weights, places, strict=True):
            source, data, order = rows_of(part)
            self._model.fill(slot, layer, source, data, first=first, place=place, row_order=order, gains=gains)
        for bias, (place, first) in zip(linear.biases, places, strict=False):
            self._model.set_bias(slot, layer, bias.to_float32(), first=first, place=place)

    def _allocate(self, slot: Slot, layer: int, parts: tuple[Stored, ...]) -> None:
        # Rows of a turned embedding are read one at a time, and an error in one stays in the sum of all layers.
        precise = self._turned and slot is Slot.EMBEDDING
        weights = Format.BF16 if precise else format_of(parts, self._quantization)
        if not precise:
            self._formats.add(weights)
        self._model.allocate(slot, layer, weights, sum(part.shape[0] for part in parts), parts[0].shape[1])

    def _set_norm(self, vector: Vector, layer: int, norm: StoredNorm) -> _Gains:
        """Give a norm its weights; a turned model's go into the matrix behind it, for which they come back."""
        gains = norm.weight.to_float32()
        self._model.set_vector(vector, layer, np.ones_like(gains) if self._turned else gains)
        if norm.bias is not None:
            self._model.set_vector(_NORM_BIASES[vector], layer, norm.bias.to_float32())
        return gains if self._turned else None

    def _set_positions(self) -> None:
        rope = self._spec.rope
        if rope is None:
            num_positions = -(-self._max_model_len // _CHUNK_TOKENS) * _CHUNK_TOKENS
            self._model.set_vector(Vector.POSITION_BIASES, 0, alibi_biases(self._spec, num_positions))
            return
        for vector, table in zip((Vector.COS, Vector.SIN), rope_angles(rope, self._max_model_len), strict=True):
            self._model.set_vector(vector, 0, table)
