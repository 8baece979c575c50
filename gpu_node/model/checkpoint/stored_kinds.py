"""Tensors as a checkpoint's files have them: records of kind, shape and bytes, and the values that these stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import TypeAlias

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.scaled_matrix import ScaledTensor

_FLOAT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the representation of its file."""

    name: str
    kind: str
    """`bfloat16`, `float16`, `float32`, or a ggml format such as `q4_0`."""
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    """[rows, bytes per row], read-only, mapped from the file; a vector is one row."""
    row_order: NDArray[np.int32] | None = None
    """Row i of Hugging Face's layout is stored as row `row_order[i]`; None: rows are in order."""
    skipped: int = 0
    """Columns of the first block of each row that do not belong to the tensor, because it was cut inside a block."""

    def take_rows(self, rows: NDArray[np.int32], *shape: int) -> StoredTensor:
        """Return a tensor of the given rows; for a vector, of the given elements."""
        if len(self.shape) == 1:
            values = self.to_float32()[rows]
            return StoredTensor(self.name, "float32", shape, values.view(np.uint8).reshape(1, -1))
        order = rows if self.row_order is None else self.row_order[rows]
        return replace(self, shape=shape, row_order=order)

    def span(self, start: int, end: int) -> StoredTensor:
        """Return a tensor of a matrix's rows from `start` to `end` (exclusive)."""
        shape = end - start, self.shape[1]
        if self.row_order is None:
            return replace(self, shape=shape, data=self.data[start:end])
        return replace(self, shape=shape, row_order=self.row_order[start:end])

    def columns(self, start: int, end: int) -> StoredTensor:
        """Return a tensor of a matrix's columns from `start` to `end` (exclusive)."""
        size, num_bytes = _block_of(self.kind)
        first, skipped = divmod(start + self.skipped, size)
        last = -(-(end + self.skipped) // size)
        data = self.data[:, first * num_bytes : last * num_bytes]
        return replace(self, shape=(self.shape[0], end - start), data=data, skipped=skipped)

    @property
    def is_in_whole_blocks(self) -> bool:
        """Whether each row of a matrix begins and ends with a block."""
        return not self.skipped and self.shape[1] % _block_of(self.kind)[0] == 0

    @property
    def rows(self) -> NDArray[np.uint8]:
        """`data` in Hugging Face's row order; a copy if the stored order differs."""
        return self.data if self.row_order is None else self.data[self.row_order]

    def to_float32(self) -> NDArray[np.float32]:
        """Return a copy of the values, in `shape` and in Hugging Face's row order."""
        values = _decoded(self, self.rows)
        if values.size > prod(self.shape):
            values = values[:, self.skipped : self.skipped + self.shape[1]]
        return values.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class DerivedTensor:
    """A matrix whose rows are made from a file's bytes when they are read, so that no whole model is copied at once."""

    name: str
    kind: str
    """As of a `StoredTensor`."""
    shape: tuple[int, ...]
    make: Callable[[NDArray[np.int32]], NDArray[np.uint8]]
    """Returns rows of the file's matrix in this kind, [rows, bytes per row]."""
    rows: NDArray[np.int32]
    """The row of the file's matrix that each row is."""

    def take_rows(self, rows: NDArray[np.int32], *_shape: int) -> DerivedTensor:
        """Return a matrix of the given rows; ignores `_shape`, which `StoredTensor.take_rows` takes."""
        return replace(self, shape=(len(rows), self.shape[1]), rows=self.rows[rows])

    def span(self, start: int, end: int) -> DerivedTensor:
        """Return a matrix of the rows from `start` to `end` (exclusive)."""
        return replace(self, shape=(end - start, self.shape[1]), rows=self.rows[start:end])

    def columns(self, start: int, end: int) -> StoredTensor:
        """Return a matrix of the columns from `start` to `end` (exclusive), in memory."""
        return self.made().columns(start, end)

    def made(self) -> StoredTensor:
        """Return the matrix in memory."""
        return StoredTensor(self.name, self.kind, self.shape, self.make(self.rows))

    def to_float32(self) -> NDArray[np.float32]:
        """Return the values, in `shape`."""
        return self.made().to_float32()


Stored: TypeAlias = StoredTensor | ScaledTensor | DerivedTensor
FindStored: TypeAlias = Callable[[str], StoredTensor | None]
ReadScaled: TypeAlias = Callable[[str, FindStored], ScaledTensor | DerivedTensor | None]
"""Reads the matrix of a name, without `.weight`, from its quantized tensors; returns None if it is not quantized."""


def _from_bfloat16(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


_DECODERS: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    "bfloat16": _from_bfloat16,
    "float16": lambda data: data.view("<f2").astype(np.float32),
    "float32": lambda data: data.view("<f4").astype(np.float32),
}


def _decoded(tensor: StoredTensor, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    check_kind(tensor)
    if tensor.kind in _DECODERS:
        return _DECODERS[tensor.kind](rows)
    values: NDArray[np.float32] = dequantize(np.ascontiguousarray(rows), GGMLQuantizationType[tensor.kind.upper()])
    return values


def _block_of(kind: str) -> tuple[int, int]:
    """Return the columns of a block and its bytes; a float is a block of its own."""
    if kind in _FLOAT_BYTES:
        return 1, _FLOAT_BYTES[kind]
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return int(size), int(num_bytes)


def check_kind(tensor: StoredTensor) -> None:
    """Raise ConfigError for a tensor in a kind whose values cannot be read."""
    if tensor.kind not in _DECODERS and not _can_dequantize(tensor.kind):
        raise ConfigError(f"tensor {tensor.name} is stored as {tensor.kind}, which cannot be read")


# Of one user, or of our own code and files.
@cache
def _can_dequantize(kind: str) -> bool:
    """Return whether the gguf package can dequantize a ggml format, found by trying one block."""
    try:
        ggml_type = GGMLQuantizationType[kind.upper()]
        dequantize(np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), np.uint8), ggml_type)
    except (KeyError, NotImplementedError):
        return False
    return True
