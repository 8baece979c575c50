"""Pack tensors of checkpoints, and matrices of adapters, into the formats and layout that the native kernels read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from penstock.gpu_node.model.architecture.mlp import Mlp
from penstock.gpu_node.model.architecture.spec import LayerSpec, ModelSpec
from penstock.gpu_node.model.checkpoint.block_repacking import block_kind, in_blocks
from penstock.gpu_node.model.checkpoint.description import Description
from penstock.gpu_node.model.checkpoint.recurrences import HeadValues, ScanValues, values_of
from penstock.gpu_node.model.checkpoint.source import Progress
from penstock.gpu_node.model.checkpoint.stored_kinds import Stored, StoredTensor
from penstock.gpu_node.model.checkpoint.stored_layer import StoredLinear, StoredNorm
from penstock.gpu_node.model.checkpoint.stored_tensors import Checkpoint
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors
from penstock.gpu_node.model.native.packed_matrix import WeightWriter
from penstock.gpu_node.model.protocol import Adapter, LowRank, MatrixName
from penstock.kernels.cpu.library import NativeModel, Slot, Vector
from penstock.kernels.cpu.structs import PANEL, STORED_FORMATS, Format, LowRankRows, RowLayout, Run, Source

_SLAB_BYTES = 16 << 20
"""Rows of an embedding table are read in slabs of this many bytes, counted in float32."""
_NORM_BIASES = {
    Vector.ATTENTION_NORM: Vector.ATTENTION_NORM_BIAS,
    Vector.MLP_NORM: Vector.MLP_NORM_BIAS,
    Vector.FINAL_NORM: Vector.FINAL_NORM_BIAS,
    Vector.EMBEDDING_NORM: Vector.EMBEDDING_NORM_BIAS,
    Vector.ATTENTION_SUM_NORM: Vector.ATTENTION_SUM_NORM_BIAS,
    Vector.MLP_SUM_NORM: Vector.MLP_SUM_NORM_BIAS,
}

_Gains: TypeAlias = NDArray[np.float32] | None


_FORMATS = {"none": Format.BF16, "int8": Format.INT8, "int8_group": Format.INT8_GROUP, "int4": Format.INT4_GROUP}
_OWN = {
    **dict.fromkeys(("bfloat16", "float16", "float32"), Format.BF16),
    "q4_1": Format.INT4_GROUP,
    "q8_0": Format.INT8_GROUP,
    **{weights.name.lower(): weights for weights in STORED_FORMATS},
}
"""The kernel format of each stored kind; float16 and float32 are rounded. Any other kind becomes grouped int8."""
_SOURCES = {source.name.lower(): source for source in Source}


def runs_of(parts: Sequence[Stored], quantization: str, *, interleaved: bool) -> list[Run]:
    """Return the format of the rows of each part of a matrix.

    With `auto`, each part keeps its own format, if they can stand beside each other. Otherwise the matrix has the most
    precise format of any part, or the format that was asked for. `interleaved`: the rows of the parts alternate.
    """
    num_rows = [part.shape[0] for part in parts]
    if quantization != "auto":
        return [(_FORMATS[quantization], sum(num_rows))]
    formats = [_OWN.get(block_kind(part), Format.INT8_GROUP) for part in parts]
    if len(set(formats)) == 1:
        return [(formats[0], sum(num_rows))]
    if Format.BF16 in formats:
        return [(Format.BF16, sum(num_rows))]
    if interleaved or any(count % PANEL for count in num_rows[:-1]):
        return [(Format.INT8_GROUP, sum(num_rows))]
    return list(zip(formats, num_rows, strict=True))


def packed_bytes(runs: Sequence[Run], columns: int) -> int:
    """Return the size of a matrix in the kernels' packed layout (src/weights/weights.h)."""
    return sum(-(-rows // PANEL) * panel_bytes(weights, -(-columns // PANEL) * PANEL) for weights, rows in runs)


def panel_bytes(weights: Format, columns: int) -> int:
    """Return the bytes of 32 rows, whose columns are padded. Blocks of a stored format keep their size."""
    if weights is Format.BF16:
        return PANEL * 2 * columns
    if weights is Format.INT8:
        return PANEL * (columns + 4)
    kind = {Format.INT8_GROUP: "Q8_0", Format.INT4_GROUP: "Q4_1"}.get(weights, weights.name)
    block_columns, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return PANEL * -(-columns // block_columns) * block_bytes


def keeps_bits(parts: Sequence[Stored], runs: Sequence[Run]) -> bool:
    """Return whether a matrix of these runs holds the parts as they are stored, each in its own format."""
    formats = {_OWN.get(part.kind) if isinstance(part, StoredTensor) else None for part in parts}
    return formats == {weights for weights, _ in runs}


def rows_of(tensor: Stored) -> tuple[Source, NDArray[np.uint8], NDArray[np.int32] | None]:
    """Return a tensor's rows as the kernels read them: their kind, bytes [rows, row bytes], and the row order.

    A row order of None means the rows are in order.
    """
    blocks = in_blocks(tensor)
    source = _SOURCES.get(blocks.kind)
    if source is not None:
        return source, blocks.data, blocks.row_order
    values = tensor.to_float32()
    return Source.FLOAT32, values.view(np.uint8).reshape(len(values), -1), None


class NotLosslessError(Exception):
    """The kernels would keep this matrix in another format than the checkpoint."""


class Packer:
    """Packs a checkpoint for the kernels matrix by matrix."""

    def __init__(
        self,
        model: NativeModel,
        tensors: DecoderTensors,
        spec: ModelSpec,
        quantization: str,
        progress: Progress,
        *,
        rotated: bool,
        after_part: Callable[[], None],
        keep: WeightWriter | None = None,
        on_read: bool = False,
    ) -> None:
        """after_part: called after each part of a matrix is packed.

        keep: the writer that receives the packed weights; the model then keeps no matrices.

        on_read: pack nothing, but let the model read the checkpoint's rows in each step. `pack` then raises
        NotLosslessError for a checkpoint whose rows are not kept as they are stored.
        """
        self._model = model
        self._keep = keep
        self._on_read = on_read
        self._spec = spec
        self._tensors = tensors
        self._after_part = after_part
        self._quantization = quantization
        self._rotated = rotated
        self._progress = progress
        self._formats: set[Format] = set()

    def pack(self) -> set[Format]:
        """Pack all weights and return the formats of the matrices."""
        spec, tensors = self._spec, self._tensors
        for layer in range(spec.num_layers):
            self._pack_layer(layer)
            self._progress("load", (layer + 1) / (spec.num_layers + 1))
        self._set_rows(Vector.POSITION_EMBEDDINGS, tensors.position_embedding())
        if (inputs := tensors.token_inputs()) is not None:
            self._fuse(Slot.TOKEN_INPUTS, 0, inputs.projection)
            self._set_vector(Vector.TOKEN_INPUT_NORM, 0, inputs.norm.to_float32() + np.float32(spec.norm_offset))
        if spec.encoder is None:
            self._pack_head()
        else:
            self._set_rows(Vector.TYPE_EMBEDDINGS, tensors.token_types())
            self._set_norm(Vector.EMBEDDING_NORM, 0, tensors.embedding_norm())
            self._set_norm(Vector.FINAL_NORM, 0, tensors.final_norm() if spec.encoder.has_final_norm else None)
            self._pack_table(Slot.EMBEDDING, tensors.embedding(), None)
        self._progress("load", 1.0)
        return self._formats

    def _pack_head(self) -> None:
        """Pack the final norm, the head, and the embeddings of tokens unless they are the head's rows."""
        tensors = self._tensors
        gains = self._set_norm(Vector.FINAL_NORM, 0, tensors.final_norm())
        if gains is not None:
            self._set_vector(Vector.FINAL_GAINS, 0, gains)
        self._pack_table(Slot.HEAD, tensors.head(), gains)
        # A tied embedding equals the head only if the final norm is not folded into the head.
        if not self._spec.tied_head or gains is not None:
            self._pack_table(Slot.EMBEDDING, tensors.embedding(), None)

    def _pack_layer(self, layer: int) -> None:
        tensors, attention_norm = self._tensors, self._tensors.attention_norm(layer)
        self._pack_recurrence(layer)
        qkv, out = tensors.qkv(layer), tensors.out(layer)
        if qkv is not None and out is not None:
            self._fuse(Slot.QKV, layer, qkv, self._set_norm(Vector.ATTENTION_NORM, layer, attention_norm))
            for vector, weight in zip((Vector.Q_NORM, Vector.K_NORM), tensors.head_norms(layer) or (), strict=False):
                if weight is not None:
                    self._set_vector(vector, layer, weight.to_float32() + np.float32(self._spec.norm_offset))
            self._fuse(Slot.OUT, layer, out)
        if (second := tensors.mixer_out(layer)) is not None:
            self._fuse(Slot.MIXER_OUT, layer, second)
        if (gates := tensors.head_gate(layer)) is not None:
            self._set_vector(
                Vector.HEAD_GATES, layer, np.pad(gates.to_float32(), ((0, 0), (0, -gates.shape[1] % PANEL)))
            )
        if (sinks := tensors.sinks(layer)) is not None:
            self._set_vector(Vector.SINKS, layer, sinks.to_float32())
        self._pack_output_norms(layer)
        mlp = self._spec.layers[layer].mlp
        if mlp is not None:
            gains = self._set_norm(Vector.MLP_NORM, layer, tensors.mlp_norm(layer) or attention_norm)
            self._pack_mlps((Slot.MLP_IN, Slot.MLP_OUT), layer, list(tensors.experts(layer)), mlp, gains)
            self._set_router(layer)
            self._pack_mixture(layer)
        if (gate := tensors.token_gate(layer)) is not None:
            self._fuse(Slot.TOKEN_GATE, layer, gate.gate)
            self._fuse(Slot.TOKEN_OUT, layer, gate.out)
            self._set_norm(Vector.TOKEN_NORM, layer, gate.norm)
        if (scale := tensors.output_scale(layer)) is not None:
            self._set_vector(Vector.OUTPUT_SCALE, layer, scale.to_float32())

    def _pack_output_norms(self, layer: int) -> None:
        """Set the norms of the outputs of attention and MLP, and those of the sums that they are added to."""
        tensors = self._tensors
        self._set_norm(Vector.ATTENTION_OUTPUT_NORM, layer, tensors.post_attention_norm(layer))
        self._set_norm(Vector.MLP_OUTPUT_NORM, layer, tensors.post_mlp_norm(layer))
        of_sums = Vector.ATTENTION_SUM_NORM, Vector.MLP_SUM_NORM
        for vector, norm in zip(of_sums, tensors.sum_norms(layer), strict=True):
            self._set_norm(vector, layer, norm)

    def _pack_recurrence(self, layer: int) -> None:
        """Set the small tensors of a recurrent mixer."""
        stored = self._tensors.recurrence(layer)
        if stored is None:
            return
        values = values_of(stored)
        self._set_vector(Vector.CONVOLUTION, layer, values.convolution)
        if values.bias is not None:
            self._set_vector(Vector.CONVOLUTION_BIAS, layer, values.bias)
        if isinstance(heads := values.heads, HeadValues):
            padding = (0, 0), (0, -heads.gates.shape[1] % PANEL)
            self._set_vector(Vector.GATES, layer, np.pad(heads.gates, padding))
            self._set_vector(Vector.DECAY_RATES, layer, heads.decay_rates)
            self._set_vector(Vector.DECAY_BIASES, layer, heads.decay_biases)
            self._set_vector(Vector.VALUE_NORM, layer, heads.norm)
        if isinstance(heads, ScanValues):
            self._set_vector(Vector.DECAY_RATES, layer, heads.decay_rates)
            self._set_vector(Vector.DECAY_BIASES, layer, heads.duration_biases)
            self._set_vector(Vector.SKIPS, layer, heads.skips)
            if heads.norm is not None:
                self._set_vector(Vector.VALUE_NORM, layer, heads.norm)

    def _set_router(self, layer: int) -> None:
        """Set the small tensors by which a layer's experts are chosen."""
        router, routing = self._tensors.router(layer), self._tensors.routing(layer)
        if router is None or routing is None:
            return
        # Zeros pad the columns, as they pad the hidden states.
        padding = (0, 0), (0, -router.shape[1] % PANEL)
        self._set_vector(Vector.ROUTER, layer, np.pad(router.to_float32(), padding))
        if routing.norm is not None:
            gains = routing.norm.to_float32() * np.float32(routing.norm_factor)
            self._set_vector(Vector.ROUTER_NORM, layer, gains)
        if routing.shared_gate is not None:
            self._set_vector(Vector.SHARED_GATE, layer, np.pad(routing.shared_gate.to_float32(), padding))
        by_expert = {
            Vector.ROUTER_BIAS: routing.bias,
            Vector.CHOICE_BIAS: routing.choice_bias,
            Vector.EXPERT_FACTORS: routing.factors,
        }
        for vector, stored in by_expert.items():
            if stored is not None:
                self._set_vector(vector, layer, stored.to_float32())

    def _pack_mixture(self, layer: int) -> None:
        """Pack the experts beside an MLP, and set the norms around both."""
        stored, mixture = self._tensors.mixture(layer), self._spec.layers[layer].mixture
        if stored is None or mixture is None:
            return
        self._pack_mlps((Slot.EXPERT_IN, Slot.EXPERT_OUT), layer, stored.experts, mixture.mlp, None)
        self._set_norm(Vector.EXPERT_NORM, layer, stored.norm)
        self._set_norm(Vector.EXPERT_OUTPUT_NORM, layer, stored.output_norm)
        self._set_norm(Vector.DENSE_OUTPUT_NORM, layer, stored.dense_norm)

    def _pack_mlps(
        self,
        slots: tuple[Slot, Slot],
        layer: int,
        experts: Sequence[tuple[StoredLinear, StoredLinear]],
        mlp: Mlp,
        gains: _Gains,
    ) -> None:
        """Pack an MLP. The matrices of several experts are one matrix, with their rows one after another."""
        inner, out = (_joined(linears) for linears in zip(*experts, strict=True))
        pack_inner = self._interleave if mlp.is_gated else self._fuse
        pack_inner(slots[0], layer, inner, gains)
        self._fuse(slots[1], layer, out)

    def _fuse(self, slot: Slot, layer: int, linear: StoredLinear, gains: _Gains = None) -> None:
        """Pack the parts into one matrix, with their rows one after another."""
        firsts = np.cumsum([0, *(part.shape[0] for part in linear.weights)]).tolist()
        self._fill(slot, layer, linear, [(RowLayout.PLAIN, first) for first in firsts[:-1]], gains)

    def _interleave(self, slot: Slot, layer: int, linear: StoredLinear, gains: _Gains) -> None:
        """Pack pairs of parts into one matrix, pair after pair; the rows of a pair alternate by half panels."""
        num_rows = linear.weights[0].shape[0] + linear.weights[1].shape[0]
        layouts = [
            (layout, pair * num_rows)
            for pair in range(len(linear.weights) // 2)
            for layout in (RowLayout.FIRST_HALF, RowLayout.SECOND_HALF)
        ]
        self._fill(slot, layer, linear, layouts, gains)

    def _fill(
        self, slot: Slot, layer: int, linear: StoredLinear, layouts: list[tuple[RowLayout, int]], gains: _Gains
    ) -> None:
        interleaved = layouts[0][0] is not RowLayout.PLAIN
        columns, runs = linear.weights[0].shape[1], self._runs_of(slot, linear.weights, interleaved=interleaved)
        self._allocate(slot, layer, linear.weights, runs, columns)
        packed = self._begin(slot, layer, runs, columns)
        for part, (layout, first) in zip(linear.weights, layouts, strict=True):
            self._pack_rows(slot, layer, part, layout, first, gains)
        for bias, (layout, first) in zip(linear.biases, layouts, strict=False):
            values = bias.to_float32()
            self._model.set_bias(slot, layer, values, first=first, layout=layout)
            if self._keep is not None:
                self._keep.add_bias(slot, layer, values, first, layout)
        self._finish(slot, layer, packed)

    def _pack_table(self, slot: Slot, table: Stored, gains: _Gains) -> None:
        """Pack a matrix with one row per vocabulary token in slabs; its rows are independent of each other.

        For a writer, each slab is packed as a matrix of its own. The slabs have whole panels, so their bytes follow one
        another as those of the one matrix.
        """
        (rows, columns), [(weights, _)] = table.shape, self._runs_of(slot, (table,))
        self._allocate(slot, 0, (table,), [(weights, rows)], columns)
        slab_rows = max(1, _SLAB_BYTES // (4 * columns * PANEL)) * PANEL
        for first in range(0, rows, slab_rows):
            slab = table.span(first, min(first + slab_rows, rows))
            packed = self._begin(slot, 0, [(weights, slab.shape[0])], columns)
            self._pack_rows(slot, 0, slab, RowLayout.PLAIN, first if packed is None else 0, gains)
            self._finish(slot, 0, packed)

    def _pack_rows(self, slot: Slot, layer: int, part: Stored, layout: RowLayout, first: int, gains: _Gains) -> None:
        source, data, order = rows_of(part)
        self._model.fill(slot, layer, source, data, first=first, layout=layout, row_order=order, gains=gains)
        self._after_part()

    def _runs_of(self, slot: Slot, parts: tuple[Stored, ...], *, interleaved: bool = False) -> list[Run]:
        is_encoder = self._spec.encoder is not None
        # Keep the embedding of a rotated model or an encoder in bfloat16: an error in its row stays in the residual
        # stream through all layers.
        is_precise_table = slot is Slot.EMBEDDING and (self._rotated or is_encoder)
        # Most of what int8 costs an encoder's vectors comes from queries and keys.
        precise = is_precise_table or (is_encoder and slot is Slot.QKV)
        runs = runs_of(parts, "none" if precise else self._quantization, interleaved=interleaved)
        if not is_precise_table:
            self._formats.update(weights for weights, _ in runs)
        return runs

    def _allocate(self, slot: Slot, layer: int, parts: Sequence[Stored], runs: list[Run], columns: int) -> None:
        """Create a matrix, and announce it to the writer. The system provides its pages only when they are filled."""
        if self._on_read:
            if not keeps_bits(parts, runs):
                raise NotLosslessError(parts[0].name)
            return self._model.pack_on_read(slot, layer, runs, columns)
        self._model.allocate(slot, layer, runs, columns)
        if self._keep is not None:
            self._keep.add_matrix(slot, layer, runs, columns, self._model.num_bytes(slot, layer))
        return None

    def _begin(self, slot: Slot, layer: int, runs: list[Run], columns: int) -> NDArray[np.uint8] | None:
        """Reserve a buffer of the writer for a matrix or a slab of it. Return None without a writer."""
        if self._keep is None:
            return None
        self._model.allocate(slot, layer, runs, columns)
        packed = self._keep.buffer(self._model.num_bytes(slot, layer))
        if sum(rows for _, rows in runs) % PANEL:
            # The rows behind the last one are zeros. A row has at most two bytes per column, or one and a scale.
            packed[-PANEL * (2 * (columns + PANEL)) :] = 0
        self._model.use(slot, layer, runs, columns, packed)
        return packed

    def _finish(self, slot: Slot, layer: int, packed: NDArray[np.uint8] | None) -> None:
        if self._keep is not None and packed is not None:
            self._model.release(slot, layer)
            self._keep.write(packed)

    def _set_norm(self, vector: Vector, layer: int, norm: StoredNorm | None) -> _Gains:
        """Set a norm's weights. With rotation, set ones and return the weights to fold into the next matrix."""
        if norm is None:
            return None
        gains = norm.weight.to_float32() + np.float32(self._spec.norm_offset)
        self._set_vector(vector, layer, np.ones_like(gains) if self._rotated else gains)
        if norm.bias is not None:
            self._set_vector(_NORM_BIASES[vector], layer, norm.bias.to_float32())
        return gains if self._rotated else None

    def _set_rows(self, vector: Vector, table: Stored | None) -> None:
        """Set a table of hidden states, if there is one. Zeros pad its columns, as they pad the hidden states."""
        if table is not None:
            self._set_vector(vector, 0, np.pad(table.to_float32(), ((0, 0), (0, -table.shape[1] % PANEL))))

    def _set_vector(self, vector: Vector, layer: int, values: NDArray[np.float32]) -> None:
        self._model.set_vector(vector, layer, values)
        if self._keep is not None:
            self._keep.add_vector(vector, layer, values)


def _joined(linears: Sequence[StoredLinear]) -> StoredLinear:
    """Return one matrix of the parts of all."""
    return StoredLinear(
        tuple(part for linear in linears for part in linear.weights),
        tuple(part for linear in linears for part in linear.biases),
    )


_SLOTS: dict[MatrixName, Slot] = {
    "qkv": Slot.QKV,
    "out": Slot.OUT,
    "mixer_out": Slot.MIXER_OUT,
    "mlp_in": Slot.MLP_IN,
    "mlp_out": Slot.MLP_OUT,
    "expert_in": Slot.EXPERT_IN,
    "expert_out": Slot.EXPERT_OUT,
    "gates": Slot.GATES,
}


class NativeAdapters:
    """Gives adapters to the native model in the row layout that `Packer` uses for the base matrices."""

    def __init__(self, model: NativeModel, described: Description, *, rotated: bool) -> None:
        self._model = model
        self._spec = described.spec
        self._source = described.source
        self._rotated = rotated

    def set(self, adapter_slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot. No step may be running."""
        for at, layer in enumerate(self._spec.layers):
            for matrix in layer.adapted_matrices:
                parts = [rows for part in adapter.low_ranks(at, matrix) for rows in self._rows(layer, matrix, part)]
                gains = self._gains.get((at, matrix)) if parts else None
                self._model.set_adapter(adapter_slot, _SLOTS[matrix], at, parts, gains)

    def _rows(self, layer: LayerSpec, matrix: MatrixName, part: LowRank) -> Iterator[LowRankRows]:
        down, up = np.ascontiguousarray(part.down), np.ascontiguousarray(part.up)
        if matrix == "mlp_in" and layer.mlp is not None and layer.mlp.is_gated:
            halves = np.split(up, 2) if layer.mlp.fused_gate else (up,)
            for half, rows in enumerate(halves, start=part.part):
                yield LowRankRows((RowLayout.FIRST_HALF, RowLayout.SECOND_HALF)[half], 0, down, rows)
            return
        first = sum(rows for _, rows in self._spec.parts_of(layer, matrix)[: part.part])
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
