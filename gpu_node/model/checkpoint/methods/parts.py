"""Read the tensors that together store one quantized matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.scaled_matrix import Floats, NumberKind, ScaledTensor
from penstock.gpu_node.model.checkpoint.stored_kinds import FindStored, ReadScaled, StoredTensor

KINDS: dict[int, NumberKind] = {4: "int4", 8: "int8"}
"""The kind of number by its bits."""
_FLOAT8 = "f8_e4m3"


@dataclass(frozen=True, slots=True)
class Method:
    """A quantization method: its `quant_method`, and the function from its settings to the reader of its matrices."""

    name: str
    reader_of: Callable[[Mapping[str, Any]], ReadScaled]


class Parts:
    """The tensors of a matrix by the last part of their names. Methods raise ConfigError for a missing or bad one."""

    def __init__(self, name: str, find: FindStored) -> None:
        """name: the matrix's name without `.weight`."""
        self.name = f"{name}.weight"
        self._name = name
        self._find = find

    def find(self, part: str) -> StoredTensor | None:
        """Return the tensor of a part; None if there is none."""
        return self._find(f"{self._name}.{part}")

    def get(self, part: str) -> StoredTensor:
        """Return the tensor of a part."""
        stored = self.find(part)
        if stored is None:
            raise ConfigError(f"the checkpoint has no tensor {self._name}.{part}")
        return stored

    def integers(self, part: str) -> NDArray[np.int32]:
        """Return a part of 32-bit integers."""
        stored = self.get(part)
        if stored.kind != "i32":
            raise ConfigError(f"tensor {stored.name} is stored as {stored.kind}, not as i32")
        return stored.data.view("<i4").reshape(stored.shape)

    def floats(self, part: str, *shape: int) -> Floats:
        """Return a part as float32; it must have the given shape."""
        stored = self.get(part)
        if stored.shape != shape:
            raise ConfigError(f"tensor {stored.name} has shape {list(stored.shape)}, its matrix needs {list(shape)}")
        return stored.to_float32()

    def scales(self, part: str, shape: tuple[int, ...], block: tuple[int, int] | None) -> tuple[Floats, int]:
        """Return the scales of a matrix of `shape`, [rows, groups], and the number of columns that share one.

        Checkpoints store one scale per matrix, per row, per group of a row, or per block of `block` rows and columns.
        """
        (rows, columns), stored = shape, self.get(part)
        if np.prod(stored.shape) == 1:
            return np.broadcast_to(stored.to_float32().reshape(1, 1), (rows, 1)), columns
        if block is not None:
            blocks = self.floats(part, -(-rows // block[0]), -(-columns // block[1]))
            return np.repeat(blocks, min(block[0], rows), axis=0)[:rows], block[1]
        if stored.shape == (rows,):
            return stored.to_float32().reshape(rows, 1), columns
        num_groups = max(1, stored.shape[-1])
        return self.floats(part, rows, num_groups), -(-columns // num_groups)


def read_float8(parts: Parts, block: tuple[int, int] | None) -> ScaledTensor | None:
    """Return a matrix that is stored in float8; None for other matrices. `block`: as for `Parts.scales`."""
    weight = parts.find("weight")
    if weight is None or weight.kind != _FLOAT8:
        return None
    part = "weight_scale_inv" if parts.find("weight_scale_inv") is not None else "weight_scale"
    rows, columns = weight.shape
    scales, group = parts.scales(part, (rows, columns), block)
    return ScaledTensor(parts.name, "fp8", weight.data, scales, None, group)


def unpacked(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Unpack 4-bit or 8-bit numbers from words along the last axis, lowest bits first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if KINDS[bits] == "int8":
        return octets
    return np.stack((octets & 15, octets >> 4), axis=-1).reshape(*words.shape[:-1], -1)


def by_any_groups(tensor: ScaledTensor, groups: NDArray[np.int32]) -> ScaledTensor:
    """Return the matrix with its columns assigned to groups in any order. groups: [columns], each column's group."""
    # Some writers leave an index of zeros where groups are in order.
    if not groups.any() or np.array_equal(groups, np.arange(tensor.shape[1]) // tensor.group):
        return tensor
    num_groups = tensor.scales.shape[1]
    if len(groups) != tensor.shape[1] or groups.min() < 0 or groups.max() >= num_groups:
        raise ConfigError(
            f"{tensor.name} has {num_groups} groups, but an index of {len(groups)} columns up to group {groups.max()}"
        )
    zeros = None if tensor.zeros is None else tensor.zeros[:, groups]
    return replace(tensor, scales=tensor.scales[:, groups], zeros=zeros, group=1)
