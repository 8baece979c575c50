"""The matrices of experts in tensors that have those of all experts of a layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.stored_kinds import DerivedTensor, FindStored, StoredTensor

EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""An expert's own number in the names of its tensors."""
_MATRIX_DIMS = 2
_STACK_DIMS = 3
_FUSED: Mapping[str, tuple[tuple[str, int | None], ...]] = {
    "gate_proj.weight": (("experts.gate_up_proj", 0), ("input_linear.weight", 0)),
    "up_proj.weight": (("experts.gate_up_proj", 1), ("input_linear.weight", 1), ("experts.up_proj", None)),
    "down_proj.weight": (("experts.down_proj", None), ("output_linear.weight", None)),
}
"""Tensors of all experts, by the last parts of an expert's own names; 0 and 1 are halves of its rows."""
_TURNED = {"gate_proj": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2), "down_proj": ("down_proj", 0, 1)}
"""The same of gpt-oss: the first row of a matrix, and the distance to the next one."""
_NUMBERS = {"bfloat16": "<u2", "float16": "<u2", "float32": "<u4"}
_MARK = ".experts.gate_up_proj_bias"
"""Only gpt-oss has biases of all experts in one tensor. Its matrices are transposed, and gates and ups alternate."""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The rows of an expert's matrix in a tensor of gpt-oss."""

    stack: str
    """The tensor's name without what tells its weights and its biases apart."""
    expert: int
    first: int
    step: int

    def of(self, count: int) -> NDArray[np.int32]:
        """Return the indices among `count` rows of the expert."""
        return np.arange(self.first, count, self.step, dtype=np.int32)


def expert_rows(name: str) -> ExpertRows | None:
    """Return where a matrix of gpt-oss's experts is, by its own name without ending; None for another name."""
    expert = EXPERT.search(name)
    if expert is None or (place := _TURNED.get(name[expert.end() :])) is None:
        return None
    stack, first, step = place
    return ExpertRows(f"{name[: expert.start()]}.experts.{stack}", int(expert[1]), first, step)


def one_of_experts(name: str, stored: FindStored) -> StoredTensor | None:
    """Return a tensor of one expert from a tensor of all experts; None if there is none.

    A matrix that is stored transposed is not found here, but by `turned_matrix`.
    """
    expert = EXPERT.search(name)
    if expert is None:
        return None
    prefix, rest = name[: expert.start()], name[expert.end() :]
    is_turned = stored(prefix + _MARK) is not None
    if is_turned:
        return _one_bias(name, stored)
    if (fused := _FUSED.get(rest)) is None:
        return None
    found = ((stored(f"{prefix}.{stacked}"), part) for stacked, part in fused)
    stack, part = next(((one, part) for one, part in found if one is not None), (None, None))
    matrix = None if stack is None else one_of_stack(stack, int(expert[1]))
    if matrix is None or part is None:
        return matrix
    half = matrix.shape[0] // 2
    return matrix.span(part * half, (part + 1) * half)


def one_of_stack(stack: StoredTensor, index: int) -> StoredTensor | None:
    """Return a matrix of a tensor [num_matrices, rows, columns], or a vector of a tensor [num_vectors, size].

    None if there is no such matrix or vector.
    """
    count, *shape = stack.shape if len(stack.shape) in (_MATRIX_DIMS, _STACK_DIMS) else (0, *stack.shape)
    if index >= count:
        return None
    rows = prod(shape[:-1])
    return replace(stack, shape=tuple(shape), data=stack.data[index * rows : (index + 1) * rows])


def turned_matrix(name: str, find: FindStored) -> DerivedTensor | None:
    """Return a matrix of gpt-oss's experts, which is stored transposed; None if it is not stored so."""
    place = expert_rows(name.removesuffix(".weight")) if name.endswith(".weight") else None
    stack = None if place is None else find(place.stack)
    if place is None or stack is None or stack.kind not in _NUMBERS:
        return None
    matrix = one_of_stack(stack, place.expert)
    if matrix is None or len(matrix.shape) != _MATRIX_DIMS:
        return None
    return transposed(matrix, name, place.of(matrix.shape[1]))


def transposed(matrix: StoredTensor, name: str, rows: NDArray[np.int32] | None = None) -> DerivedTensor:
    """Return a matrix that is stored as [columns, rows]; rows: some of them, None for all.

    Raises ConfigError for a matrix that is not stored as floats.
    """
    if matrix.kind not in _NUMBERS:
        raise ConfigError(f"tensor {name} is stored transposed as {matrix.kind}; supported: {', '.join(_NUMBERS)}")
    columns, count = matrix.shape
    rows = np.arange(count, dtype=np.int32) if rows is None else rows
    return DerivedTensor(name, matrix.kind, (len(rows), columns), _transposing(matrix), rows)


def _transposing(matrix: StoredTensor) -> Callable[[NDArray[np.int32]], NDArray[np.uint8]]:
    numbers = matrix.data.view(_NUMBERS[matrix.kind])

    def make(rows: NDArray[np.int32]) -> NDArray[np.uint8]:
        return np.ascontiguousarray(numbers[:, rows].T).view(np.uint8)

    return make


def _one_bias(name: str, stored: FindStored) -> StoredTensor | None:
    place = expert_rows(name.removesuffix(".bias")) if name.endswith(".bias") else None
    stack = None if place is None else stored(f"{place.stack}_bias")
    vector = None if place is None or stack is None else one_of_stack(stack, place.expert)
    if place is None or vector is None or len(vector.shape) != 1:
        return None
    rows = place.of(vector.shape[0])
    return replace(vector, name=name).take_rows(rows, len(rows))
