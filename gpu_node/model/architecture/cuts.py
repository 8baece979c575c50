"""How a model is cut into ranks: the rows, heads and layers of each rank, and what cannot be cut.

Pure functions of a spec, without torch and without files, so that runners, commands and tests share one set of rules.
A rank is one process with a part of the model. `tensor` ranks share every layer; `pipeline` groups of them have
consecutive layers each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import ModelSpec

CutRunner: TypeAlias = Literal["native", "torch", "gpu"]
"""Runners whose models can be cut. native: uneven cuts by KV head and by panel, layers whole; torch and gpu: equal
cuts."""
PANEL_ROWS = 32
"""Output rows that the native kernels keep and compute together (PANEL of kernels/cpu/formats.py)."""


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
