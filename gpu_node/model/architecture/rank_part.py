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
from penstock.gpu_node.model.architecture.mlp import Mlp
from penstock.gpu_node.model.architecture.spec import Attention, LayerSpec, ModelSpec
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


def check_one_rank(spec: ModelSpec, parallel: Parallel) -> None:
    """Raise ConfigError for several ranks if no runner cuts the model, whatever the numbers of ranks."""
    for setting, problem in _uncut_problems(spec, parallel):
        raise ConfigError(problem, param=setting)


def cut_problems(
    spec: ModelSpec, parallel: Parallel, runner: CutRunner, *, column_group: int = 1
) -> Iterator[tuple[str, str]]:
    """Yield why a model cannot be cut so: the setting, and a sentence that names what does not divide.

    column_group: columns of a matrix that share a scale; a cut by columns must not divide a group.
    """
    name = "tensor_parallel_size"
    if uncut := list(_uncut_problems(spec, parallel)):
        yield from uncut
        return
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


def _uncut_problems(spec: ModelSpec, parallel: Parallel) -> Iterator[tuple[str, str]]:
    if parallel.num_ranks > 1 and (uncut := _uncut_features(spec)):
        setting = "tensor_parallel_size" if parallel.tensor > 1 else "pipeline_parallel_size"
        yield setting, f"{setting} {parallel.num_ranks}: a model with {uncut} is computed by one rank"


def _uncut_features(spec: ModelSpec) -> str:
    """Return what a model has that no rank computes a part of."""
    present = {
        "recurrent layers": bool(spec.recurrences),
        "output gates of attention": any(one.output_gate or one.head_gate for one in spec.attentions),
        "layers that read the keys of others": any(one.source is not None for one in spec.attentions),
        "embeddings of tokens for each layer": spec.token_inputs is not None,
        "experts beside an MLP": any(layer.mixture is not None for layer in spec.kinds),
    }
    return " and ".join(name for name, is_present in present.items() if is_present)


def _native_problems(spec: ModelSpec, size: int) -> Iterator[str]:
    fewest = min((one.num_kv_heads for one in spec.attentions), default=size)
    if size > fewest:
        yield f"the native runner cuts by KV head, and the model has {fewest} (num_kv_heads)"


def _even_problems(spec: ModelSpec, size: int) -> Iterator[str]:
    for number in dict.fromkeys(one.num_kv_heads for one in spec.attentions):
        if number % size and size % number:
            yield f"num_kv_heads {number} is neither a multiple nor a divisor of it"
    numbers = [("num_heads", one.num_heads) for one in spec.attentions]
    numbers += [("intermediate_size", one.intermediate_size) for one in spec.mlps]
    for name, number in dict.fromkeys(numbers):
        if number % size:
            yield f"{name} {number} is not a multiple of it"


def _group_problems(spec: ModelSpec, size: int, column_group: int) -> Iterator[str]:
    columns = [("num_heads x head_dim", one.queries) for one in spec.attentions]
    columns += [("intermediate_size", one.intermediate_size) for one in spec.mlps]
    for name, number in dict.fromkeys(columns):
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


def kv_head_spans(attention: Attention, size: int) -> tuple[range, ...]:
    """Return the KV heads of each rank in a layer. With more ranks than KV heads, consecutive ranks hold the same one.

    The spans are uneven where `size` does not divide the KV heads, which only the native runner allows.
    """
    if size > attention.num_kv_heads:
        copies = size // attention.num_kv_heads
        return tuple(range(rank // copies, rank // copies + 1) for rank in range(size))
    return even_spans(attention.num_kv_heads, size)


def head_spans(attention: Attention, size: int) -> tuple[range, ...]:
    """Return the query heads of each rank: those of its KV heads, or a part of them if several ranks hold the same."""
    if size > attention.num_kv_heads:
        return even_spans(attention.num_heads, size)
    queries = attention.num_heads // attention.num_kv_heads
    return tuple(range(span.start * queries, span.stop * queries) for span in kv_head_spans(attention, size))


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
        own = {layer: self._part_of(layer) for layer in self.whole.kinds}
        return replace(self.whole, layers=tuple(own[self.whole.layers[at]] for at in self.layers))

    def _part_of(self, layer: LayerSpec) -> LayerSpec:
        attention, mlp = layer.attention, layer.mlp
        if attention is not None:
            heads, kv_heads = len(self.heads(attention)), len(self.kv_heads(attention))
            attention = replace(attention, num_heads=heads, num_kv_heads=kv_heads)
        if mlp is not None:
            mlp = replace(mlp, intermediate_size=len(self.inner(mlp)))
        return replace(layer, attention=attention, mlp=mlp)

    @cached_property
    def layers(self) -> range:
        """The layers of its stage. The largest stage is as small as it can be, with the head in the last one."""
        whole = self.whole
        if self.num_stages == 1:
            return range(whole.num_layers)
        sizes = {layer: whole.layer_weights(layer) for layer in whole.kinds}
        of_head = whole.vocab_size * whole.hidden_size
        return stage_layers([sizes[layer] for layer in whole.layers], self.num_stages, last_bytes=of_head)[self.stage]

    @property
    def is_first(self) -> bool:
        """Whether it begins with the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with the head."""
        return self.stage == self.num_stages - 1

    def heads(self, attention: Attention) -> range:
        """Return its query heads in a layer of the whole model."""
        return head_spans(attention, self.size)[self.rank]

    def kv_heads(self, attention: Attention) -> range:
        """Return the KV heads that its query heads read."""
        return kv_head_spans(attention, self.size)[self.rank]

    def queries(self, attention: Attention) -> range:
        """Return the channels of its query heads."""
        return _channels(self.heads(attention), attention)

    def keys(self, attention: Attention) -> range:
        """Return the channels of its KV heads."""
        return _channels(self.kv_heads(attention), attention)

    def inner(self, mlp: Mlp) -> range:
        """Return its channels inside an MLP of the whole model."""
        return even_spans(mlp.intermediate_size, self.size)[self.rank]

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
        routers = sum(sum(mlp.num_experts for mlp in layer.mlps if mlp.experts) for layer in spec.layers)
        if self.is_last:
            tables += self.vocab_width
        if self.is_first and not (self.is_last and spec.tied_head):
            tables += len(self.vocab)
        return sum(map(spec.layer_weights, spec.layers)) + (routers + tables) * spec.hidden_size

    def columns_of(self, layer: LayerSpec, matrix: MatrixName) -> range:
        """Return the columns of a matrix in a layer of the whole model: all of them where it is cut by rows."""
        if matrix == "out" and layer.attention is not None:
            return self.queries(layer.attention)
        if matrix == "mlp_out" and layer.mlp is not None:
            return self.inner(layer.mlp)
        return range(self.whole.columns_of(layer, matrix))

    def rows_of(self, layer: LayerSpec, matrix: MatrixName) -> tuple[Rows, ...]:
        """Return the rows of each part of a matrix in a layer of the whole model (`ModelSpec.parts_of`)."""
        attention, mlp = layer.attention, layer.mlp
        if matrix == "mlp_in" and mlp is not None:
            inner = _indices(self.inner(mlp))
            if mlp.fused_gate:
                return (np.concatenate((inner, inner + mlp.intermediate_size)),)
            return (inner,) * len(mlp.mlp_in)
        if matrix == "qkv" and attention is not None:
            queries, keys = _indices(self.queries(attention)), _indices(self.keys(attention))
            if not attention.is_fused:
                return (queries, keys, keys)[: len(attention.qkv)]
            first_key = attention.queries
            return (np.concatenate((queries, first_key + keys, first_key + attention.keys + keys)),)
        return tuple(_indices(range(rows)) for _, rows in self.whole.parts_of(layer, matrix))


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
        part, at = self._part, self._part.layers[layer]
        spec = part.whole.layers[at]
        columns, rows = part.columns_of(spec, matrix), part.rows_of(spec, matrix)
        return tuple(
            LowRank(term.part, term.down[:, columns.start : columns.stop], term.up[rows[term.part]])
            for term in self._whole.low_ranks(at, matrix)
        )


def _channels(heads: range, attention: Attention) -> range:
    return range(heads.start * attention.head_dim, heads.stop * attention.head_dim)


def _indices(numbers: Sequence[int]) -> Rows:
    return np.asarray(numbers, dtype=np.int32)
