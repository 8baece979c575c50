"""A checkpoint's tensors by the part that they play in a decoder, whatever their names and however they are fused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.gpu_node.model.checkpoint import Checkpoint, Stored
from penstock.gpu_node.model.spec import ModelSpec


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
        spec = self._spec
        kv_size = spec.num_kv_heads * spec.head_dim
        sizes = spec.num_heads * spec.head_dim, kv_size, kv_size
        names = [name.format(layer=layer) for name in spec.names.qkv]
        if len(names) == len(sizes):
            return self._linear(names, sizes, spec.hidden_size, has_bias=spec.qkv_bias)
        fused = self._linear(names, (sum(sizes),), spec.hidden_size, has_bias=spec.qkv_bias)
        return StoredLinear(
            tuple(part for weight in fused.weights for part in self._unfused(weight)),
            tuple(part for bias in fused.biases for part in self._unfused(bias)),
        )

    def out(self, layer: int) -> StoredLinear:
        """[hidden, num_heads * head_dim]."""
        spec = self._spec
        name, columns = spec.names.out.format(layer=layer), spec.num_heads * spec.head_dim
        return self._linear([name], (spec.hidden_size,), columns, has_bias=spec.out_bias)

    def mlp_in(self, layer: int) -> StoredLinear:
        """[intermediate, hidden] for each input of the MLP's activation."""
        spec = self._spec
        names = [name.format(layer=layer) for name in spec.names.mlp_in]
        sizes = (spec.intermediate_size,) * len(names)
        return self._linear(names, sizes, spec.hidden_size, has_bias=spec.mlp_bias)

    def mlp_out(self, layer: int) -> StoredLinear:
        """[hidden, intermediate]."""
        spec = self._spec
        name = spec.names.mlp_out.format(layer=layer)
        return self._linear([name], (spec.hidden_size,), spec.intermediate_size, has_bias=spec.mlp_bias)

    def _table(self, name: str) -> Stored:
        return self._checkpoint.get(f"{name}.weight", self._spec.vocab_size, self._spec.hidden_size)

    def _norm(self, name: str) -> StoredNorm:
        weight = self._checkpoint.get(f"{name}.weight", self._spec.hidden_size)
        has_bias = self._spec.norm == "layer"
        return StoredNorm(weight, self._checkpoint.get(f"{name}.bias", self._spec.hidden_size) if has_bias else None)

    def _linear(self, names: list[str], sizes: tuple[int, ...], columns: int, *, has_bias: bool) -> StoredLinear:
        get, parts = self._checkpoint.get, tuple(zip(names, sizes, strict=True))
        return StoredLinear(
            tuple(get(f"{name}.weight", size, columns) for name, size in parts),
            tuple(get(f"{name}.bias", size) for name, size in parts if has_bias),
        )

    def _unfused(self, fused: Stored) -> tuple[Stored, ...]:
        """Queries, keys and values of a tensor that keeps them by key head."""
        spec = self._spec
        by_head = np.arange(fused.shape[0], dtype=np.int32).reshape(spec.num_kv_heads, -1, spec.head_dim)
        split = (by_head[:, :-2].ravel(), by_head[:, -2].ravel(), by_head[:, -1].ravel())
        return tuple(fused.take_rows(rows, len(rows), *fused.shape[1:]) for rows in split)
