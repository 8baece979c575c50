"""How a model is cut into ranks: the layers, heads, channels and rows that each computes, and what cannot be cut.

Pure functions of a spec, without torch and without files, so that runners, commands and tests share one set of rules.
A rank is one process with a part of the model. `tensor` ranks share every layer; `pipeline` groups of them have
consecutive layers each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import MATRICES, ModelSpec
from penstock.gpu_node.model.protocol import Adapter, LowRank, MatrixName

CutRunner: TypeAlias = Literal["native", "torch", "gpu"]
"""Runners whose models can be cut. native: uneven cuts by KV head and by panel, layers whole; torch and gpu: equal
cuts."""
PANEL_ROWS = 32
"""Output rows that the native kernels keep and compute together (PANEL of kernels/cpu/structs.py)."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """The number of ranks of a node in each direction."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the node."""
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        return f"TP {self.tensor} x PP {self.pipeline}"


def check_cuts(spec: ModelSpec, parallel: Parallel, runner: CutRunner, *, column_group: int = 1) -> None:
    """Raise ConfigError with all of `cut_problems`, under the name of the setting that the first one is about."""
    problems = list(cut_problems(spec, parallel, runner, column_group=column_group))
    if problems:
        raise ConfigError("; ".join(problem for _, problem in problems), param=problems[0][0])


def cut_problems(
    spec: ModelSpec, parallel: Parallel, runner: CutRunner, *, column_group: int = 1
) -> Iterator[tuple[str, str]]:
    """Yield why a model cannot be cut so: the setting, and a sentence that names what does not divide.

    column_group: columns of a matrix that share a scale; a cut by columns must not divide a group.
    """
    name = "tensor_parallel_size"
    if parallel.tensor < 1:
        yield name, f"{name} is {parallel.tensor} but must be at least 1"
    elif parallel.tensor > 1:
        rules = _native_problems(spec, parallel.tensor) if runner == "native" else _even_problems(spec, parallel.tensor)
        for problem in rules:
            yield name, f"{name} {parallel.tensor}: {problem}"
        if runner != "native":
            for problem in _group_problems(spec, parallel.tensor, column_group):
                yield name, f"{name} {parallel.tensor}: {problem}"
    yield from _pipeline_problems(spec, parallel.pipeline, runner)


def _native_problems(spec: ModelSpec, size: int) -> Iterator[str]:
    if size > spec.num_kv_heads:
        yield f"the native runner cuts by KV head, and the model has {spec.num_kv_heads} (num_kv_heads)"


def _even_problems(spec: ModelSpec, size: int) -> Iterator[str]:
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        yield f"num_kv_heads {spec.num_kv_heads} is neither a multiple nor a divisor of it"
    for name, number in {"num_heads": spec.num_heads, "intermediate_size": spec.intermediate_size}.items():
        if number % size:
            yield f"{name} {number} is not a multiple of it"


def _group_problems(spec: ModelSpec, size: int, column_group: int) -> Iterator[str]:
    columns = {"num_heads x head_dim": spec.num_heads * spec.head_dim, "intermediate_size": spec.intermediate_size}
    for name, number in columns.items():
        if column_group > 1 and number % size == 0 and (number // size) % column_group:
            yield f"{name} {number} leaves {number // size} columns for a rank, no whole groups of {column_group}"


def _pipeline_problems(spec: ModelSpec, size: int, runner: CutRunner) -> Iterator[tuple[str, str]]:
    name = "pipeline_parallel_size"
    if size < 1:
        yield name, f"{name} is {size} but must be at least 1"
    elif size > 1 and runner == "native":
        yield name, f"{name} {size}: the native runner has no stages; use runner torch, or tensor_parallel_size"
    elif size > 1 and runner == "gpu":
        yield name, f"{name} {size}: the GPU runner has no stages; use tensor_parallel_size"
    elif size > spec.num_layers:
        yield name, f"{name} {size}: the model has only {spec.num_layers} layers (num_layers)"


def even_spans(count: int, parts: int) -> tuple[range, ...]:
    """Return consecutive ranges that cover `count` items. Their sizes differ by one at most, larger ones first."""
    size, rest = divmod(count, parts)
    ends = list(accumulate((size + (part < rest) for part in range(parts)), initial=0))
    return tuple(range(start, end) for start, end in pairwise(ends))


def panel_spans(num_rows: int, parts: int, *, panel: int = PANEL_ROWS) -> tuple[range, ...]:
    """Return the rows of each rank of the native runner: whole panels, of which the last one may be incomplete."""
    panels = even_spans(-(-num_rows // panel), parts)
    return tuple(range(span.start * panel, min(span.stop * panel, num_rows)) for span in panels)


def kv_head_spans(spec: ModelSpec, size: int) -> tuple[range, ...]:
    """Return the KV heads of each rank. With more ranks than KV heads, consecutive ranks hold the same one.

    The spans are uneven where `size` does not divide the KV heads, which only the native runner allows.
    """
    if size > spec.num_kv_heads:
        copies = size // spec.num_kv_heads
        return tuple(range(rank // copies, rank // copies + 1) for rank in range(size))
    return even_spans(spec.num_kv_heads, size)


def head_spans(spec: ModelSpec, size: int) -> tuple[range, ...]:
    """Return the query heads of each rank: those of its KV heads, or a part of them if several ranks hold the same."""
    if size > spec.num_kv_heads:
        return even_spans(spec.num_heads, size)
    queries = spec.num_heads // spec.num_kv_heads
    return tuple(range(span.start * queries, span.stop * queries) for span in kv_head_spans(spec, size))


def stage_layers(
    layer_bytes: Sequence[int], num_stages: int, *, first_bytes: int = 0, last_bytes: int = 0
) -> tuple[range, ...]:
    """Return the layers of each stage of a pipeline: consecutive, at least one, so that the largest stage is smallest.

    first_bytes: what the first stage holds beside its layers, such as the embedding; last_bytes: likewise the last
    stage, such as the head. Among equal choices, earlier stages take more layers.
    """
    num_layers = len(layer_bytes)
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(f"pipeline_parallel_size {num_stages} must be from 1 to the model's {num_layers} layers")
    before = list(accumulate(layer_bytes, initial=0))
    # largest[end]: bytes of the largest stage if the first stages have the layers before `end`; starts: where the last
    # of them begins.
    largest = [first_bytes + number for number in before]
    starts: list[list[int]] = []
    for stage in range(1, num_stages):
        extra = last_bytes if stage == num_stages - 1 else 0
        begins = [0] * (num_layers + 1)
        found = list(largest)
        for end in range(stage + 1, num_layers + 1):
            costs = [(max(largest[start], before[end] - before[start] + extra), start) for start in range(stage, end)]
            found[end], begins[end] = min(costs, key=lambda cost: (cost[0], -cost[1]))
        largest = found
        starts.append(begins)
    stages, end = [], num_layers
    for begins in reversed(starts):
        stages.append(range(begins[end], end))
        end = begins[end]
    return (range(end), *reversed(stages))


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

    @cached_property
    def num_weights(self) -> int:
        """The numbers in its matrices, embedding and head included. If these are one matrix, it counts once."""
        spec, tables = self.spec, 0
        num_experts = 1 if spec.experts is None else spec.experts.count
        layer = 0 if spec.experts is None else num_experts * spec.hidden_size
        for name in MATRICES:
            rows = sum(count for _, count in spec.parts_of(name))
            layer += rows * len(self.columns_of(name)) * (num_experts if "mlp" in name else 1)
        if self.is_last:
            tables += self.vocab_width
        if self.is_first and not (self.is_last and spec.tied_head):
            tables += len(self.vocab)
        return len(self.layers) * layer + tables * spec.hidden_size

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
