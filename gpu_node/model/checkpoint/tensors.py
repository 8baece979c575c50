"""A checkpoint's tensors by the part that they play in a decoder, whatever their names and however they are fused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.architecture.spec import MatrixName, ModelSpec
from penstock.gpu_node.model.checkpoint.files import Checkpoint, Stored


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """The parts of a matrix, whose rows follow each other."""

    weights: tuple[Stored, ...]
    biases: tuple[Stored, ...] = ()
    """One a part, or none at all."""


@dataclass(frozen=True, slots=True)
class StoredNorm:
    """A norm's factors, and what a layer norm adds."""

    weight: Stored
    bias: Stored | None


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One decoder layer; what its parts are is said where `DecoderTensors` has each alone."""

    attention_norm: StoredNorm
    qkv: StoredLinear
    head_norms: tuple[Stored, Stored] | None
    out: StoredLinear
    mlp_norm: StoredNorm | None
    mlp_in: StoredLinear
    mlp_out: StoredLinear


class DecoderTensors:
    """Finds them. Who asks for one that is missing or not of the config's shape gets a ConfigError naming it."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        self._checkpoint = checkpoint
        self._spec = spec

    def release(self) -> None:
        """Let go of the checkpoint's pages that were read."""
        self._checkpoint.release()

    def embedding(self) -> Stored:
        """[vocab, hidden]."""
        return self._table(self._spec.names.embedding)

    def head(self) -> Stored:
        """[vocab, hidden], the embedding where they are tied."""
        return self.embedding() if self._spec.tied_head else self._table(self._spec.names.head)

    def final_norm(self) -> StoredNorm:
        """Of the hidden state, before the head."""
        return self._norm(self._spec.names.final_norm)

    def layer(self, layer: int) -> StoredLayer:
        """All of a layer."""
        return StoredLayer(
            attention_norm=self.attention_norm(layer),
            qkv=self.qkv(layer),
            head_norms=self.head_norms(layer),
            out=self.out(layer),
            mlp_norm=self.mlp_norm(layer),
            mlp_in=self.mlp_in(layer),
            mlp_out=self.mlp_out(layer),
        )

    def attention_norm(self, layer: int) -> StoredNorm:
        """Of the hidden state, before the attention."""
        return self._norm(self._spec.names.attention_norm.format(layer=layer))

    def mlp_norm(self, layer: int) -> StoredNorm | None:
        """Of the hidden state, before the MLP; None where that reads what the attention reads."""
        name = self._spec.names.mlp_norm
        return None if name is None else self._norm(name.format(layer=layer))

    def head_norms(self, layer: int) -> tuple[Stored, Stored] | None:
        """The factors of queries and keys, [head_dim] each, where heads are normed."""
        names, size = self._spec.names, self._spec.head_dim
        if names.q_norm is None or names.k_norm is None:
            return None
        q, k = (
            self._checkpoint.get(f"{name.format(layer=layer)}.weight", size) for name in (names.q_norm, names.k_norm)
        )
        return q, k

    def qkv(self, layer: int) -> StoredLinear:
        """Queries [num_heads * head_dim, hidden], keys and values [num_kv_heads * head_dim, hidden]."""
        stored = self._linear("qkv", layer, has_bias=self._spec.qkv_bias)
        if len(self._spec.names.qkv) > 1:
            return stored
        return StoredLinear(
            tuple(part for weight in stored.weights for part in self._unfused(weight)),
            tuple(part for bias in stored.biases for part in self._unfused(bias)),
        )

    def out(self, layer: int) -> StoredLinear:
        """[hidden, num_heads * head_dim]."""
        return self._linear("out", layer, has_bias=self._spec.out_bias)

    def mlp_in(self, layer: int) -> StoredLinear:
        """[intermediate, hidden] for each input of the MLP's activation."""
        return self._linear("mlp_in", layer, has_bias=self._spec.mlp_bias)

    def mlp_out(self, layer: int) -> StoredLinear:
        """[hidden, intermediate]."""
        return self._linear("mlp_out", layer, has_bias=self._spec.mlp_bias)

    def _table(self, name: str) -> Stored:
        return self._checkpoint.get(f"{name}.weight", self._spec.vocab_size, self._spec.hidden_size)

    def _norm(self, name: str) -> StoredNorm:
        weight = self._checkpoint.get(f"{name}.weight", self._spec.hidden_size)
        has_bias = self._spec.norm == "layer"
        return StoredNorm(weight, self._checkpoint.get(f"{name}.bias", self._spec.hidden_size) if has_bias else None)

    def _linear(self, matrix: MatrixName, layer: int, *, has_bias: bool) -> StoredLinear:
        get, columns = self._checkpoint.get, self._spec.columns_of(matrix)
        parts = [(name.format(layer=layer), rows) for name, rows in self._spec.parts_of(matrix)]
        return StoredLinear(
            tuple(get(f"{name}.weight", rows, columns) for name, rows in parts),
            tuple(get(f"{name}.bias", rows) for name, rows in parts if has_bias),
        )

    def _unfused(self, fused: Stored) -> tuple[Stored, ...]:
        """Queries, keys and values of a tensor that keeps them by key head."""
        return tuple(fused.take_rows(rows, len(rows), *fused.shape[1:]) for rows in rows_by_part(self._spec))


def rows_by_part(spec: ModelSpec) -> tuple[NDArray[np.int32], ...]:
    """Which rows of a tensor that keeps them by key head are the queries', the keys' and the values'."""
    num_rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    by_head = np.arange(num_rows, dtype=np.int32).reshape(spec.num_kv_heads, -1, spec.head_dim)
    return by_head[:, :-2].ravel(), by_head[:, -2].ravel(), by_head[:, -1].ravel()
