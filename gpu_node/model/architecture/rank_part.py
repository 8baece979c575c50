"""The part of a model that one rank computes: its layers, heads, channels of each MLP, and rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.architecture.cuts import (
    Parallel,
    check_cuts,
    even_spans,
    head_spans,
    kv_head_spans,
    stage_layers,
)
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.protocol import Adapter, LowRank, MatrixName

Rows = NDArray[np.int32]


@dataclass(frozen=True)
class RankPart:
    """The part of a model that one of its ranks computes. Raises ConfigError if the model cannot be cut so.

    A rank has whole heads. With more ranks than KV heads, several ranks have the same KV head.
    """

    whole: ModelSpec
    rank: int = 0
    """Among the ranks that compute the same layers."""
    size: int = 1
    """The number of those ranks."""
    stage: int = 0
    num_stages: int = 1
    vocab_multiple: int = 1
    """The rows of embedding and head that each rank has are a multiple of this, but for the last rows."""

    def __post_init__(self) -> None:
        check_cuts(self.whole, Parallel(self.size, self.num_stages), "torch")

    @cached_property
    def spec(self) -> ModelSpec:
        """The spec of this part alone. Its vocabulary is the whole one."""
        whole, layers = self.whole, slice(self.layers.start, self.layers.stop)
        return replace(
            whole,
            num_layers=len(self.layers),
            windows=whole.windows[layers],
            layer_ropes=whole.layer_ropes[layers],
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
        )

    @cached_property
    def layers(self) -> range:
        """The layers of its stage. The largest stage is as small as it can be, with the head in the last one."""
        whole = self.whole
        if self.num_stages == 1:
            return range(whole.num_layers)
        attention = 2 * (whole.num_heads + whole.num_kv_heads) * whole.head_dim
        mlps = (3 if whole.is_gated else 2) * whole.intermediate_size * (whole.experts.count if whole.experts else 1)
        of_layers = [(attention + mlps) * whole.hidden_size] * whole.num_layers
        of_head = whole.vocab_size * whole.hidden_size
        return stage_layers(of_layers, self.num_stages, last_bytes=of_head)[self.stage]

    @property
    def is_first(self) -> bool:
        """Whether it begins with the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with the head."""
        return self.stage == self.num_stages - 1

    @property
    def heads(self) -> range:
        """The query heads."""
        return head_spans(self.whole, self.size)[self.rank]

    @property
    def kv_heads(self) -> range:
        """The KV heads that its query heads read."""
        return kv_head_spans(self.whole, self.size)[self.rank]

    @property
    def inner(self) -> range:
        """The channels inside each MLP."""
        return even_spans(self.whole.intermediate_size, self.size)[self.rank]

    @property
    def vocab_width(self) -> int:
        """Rows of the vocabulary that each rank but the last ones has; those have fewer."""
        return -(-self.whole.vocab_size // (self.size * self.vocab_multiple)) * self.vocab_multiple

    @property
    def vocab(self) -> range:
        """The rows of embedding and head."""
        first = min(self.rank * self.vocab_width, self.whole.vocab_size)
        return range(first, min(first + self.vocab_width, self.whole.vocab_size))

    def channels(self, heads: range) -> range:
        """Return the channels of heads."""
        return range(heads.start * self.whole.head_dim, heads.stop * self.whole.head_dim)

    def columns_of(self, matrix: MatrixName) -> range:
        """Return the columns of a layer's matrix: all of them where the matrix is cut by rows."""
        if matrix == "out":
            return self.channels(self.heads)
        return self.inner if matrix == "mlp_out" else range(self.whole.hidden_size)

    def rows_of(self, matrix: MatrixName) -> tuple[Rows, ...]:
        """Return the rows of each part of a layer's matrix, in the parts of `ModelSpec.parts_of`."""
        whole = self.whole
        if matrix in ("out", "mlp_out"):
            return (_indices(range(whole.hidden_size)),)
        if matrix == "mlp_in":
            inner = _indices(self.inner)
            if whole.fused_gate:
                return (np.concatenate((inner, inner + whole.intermediate_size)),)
            return (inner,) * len(whole.names.mlp_in)
        queries, keys = _indices(self.channels(self.heads)), _indices(self.channels(self.kv_heads))
        if len(whole.names.qkv) > 1:
            return queries, keys, keys
        first_key, num_keys = whole.num_heads * whole.head_dim, whole.num_kv_heads * whole.head_dim
        return (np.concatenate((queries, first_key + keys, first_key + num_keys + keys)),)


@dataclass(frozen=True, slots=True)
class RankAdapter:
    """The part of an adapter that one rank multiplies with; fields: the whole adapter, the part of the model."""

    _whole: Adapter
    _part: RankPart

    @property
    def name(self) -> str:
        """The name of the whole adapter."""
        return self._whole.name

    @property
    def digest(self) -> str:
        """The digest of the whole adapter."""
        return self._whole.digest

    def low_ranks(self, layer: int, matrix: MatrixName) -> tuple[LowRank, ...]:
        """Return the low-rank terms added to the rank's part of the matrix of one of its layers."""
        columns, rows = self._part.columns_of(matrix), self._part.rows_of(matrix)
        return tuple(
            LowRank(term.part, term.down[:, columns.start : columns.stop], term.up[rows[term.part]])
            for term in self._whole.low_ranks(self._part.layers[layer], matrix)
        )


def _indices(numbers: Sequence[int]) -> Rows:
    return np.asarray(numbers, dtype=np.int32)
