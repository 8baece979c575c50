"""The part of a decoder's tensors that one rank computes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.gpu_node.model.architecture.rank_part import RankPart
from penstock.gpu_node.model.checkpoint.stored_kinds import Stored
from penstock.gpu_node.model.checkpoint.stored_layer import StoredLayer, StoredLinear
from penstock.gpu_node.model.checkpoint.stored_tensors import Checkpoint
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors


class RankTensors(DecoderTensors):
    """Finds the tensors of a decoder and cuts them for a rank.

    Most matrices are cut by rows. Those behind the attention, and the second ones of MLPs, are cut by columns. There
    the products of all ranks are added up, so only rank 0 has the biases.
    """

    def __init__(self, checkpoint: Checkpoint, part: RankPart) -> None:
        super().__init__(checkpoint, part.whole)
        self._part = part

    def layer(self, layer: int) -> StoredLayer:
        """Return the rank's part of all tensors of one of its layers."""
        part, at = self._part, self._part.layers[layer]
        spec, stored = part.whole.layers[at], super().layer(at)
        if part.size == 1:
            return stored
        if spec.attention is not None and stored.qkv is not None and stored.out is not None:
            queries, keys = part.queries(spec.attention), part.keys(spec.attention)
            norms = stored.head_norms
            if norms is not None and spec.attention.joint_head_norms:
                norms = _elements(norms[0], queries), None if norms[1] is None else _elements(norms[1], keys)
            qkv, out = _by_rows(stored.qkv, (queries, keys, keys)), self._by_columns(stored.out, queries)
            sinks = None if stored.sinks is None else _elements(stored.sinks, part.heads(spec.attention))
            stored = replace(stored, qkv=qkv, head_norms=norms, out=out, sinks=sinks)
        if spec.mlp is None:
            return stored
        own = part.inner(spec.mlp)
        experts = (
            (_by_rows(inner, [own] * len(inner.weights)), self._by_columns(out, own)) for inner, out in stored.experts
        )
        return replace(stored, experts=tuple(experts))

    def _table(self, name: str) -> Stored:
        rows = self._part.vocab
        return super()._table(name).span(rows.start, rows.stop)

    def _by_columns(self, linear: StoredLinear, columns: range) -> StoredLinear:
        weights = tuple(weight.columns(columns.start, columns.stop) for weight in linear.weights)
        return StoredLinear(weights, linear.biases if self._part.rank == 0 else ())


def _by_rows(linear: StoredLinear, rows: Sequence[range]) -> StoredLinear:
    weights = (weight.span(some.start, some.stop) for weight, some in zip(linear.weights, rows, strict=True))
    biases = (_elements(bias, some) for bias, some in zip(linear.biases, rows, strict=False))
    return StoredLinear(tuple(weights), tuple(biases))


def _elements(vector: Stored, some: range) -> Stored:
    return vector.take_rows(np.asarray(some, dtype=np.int32), len(some))
