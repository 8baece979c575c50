"""Packed matrices, which a packer hands to a model that already serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.native.background_writer import pages
from penstock.kernels.cpu.library import NativeModel, Slot, Vector
from penstock.kernels.cpu.structs import RowLayout, Run


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A whole matrix, with the arguments of `NativeModel.use`."""

    slot: Slot
    layer: int
    runs: Sequence[Run]
    columns: int
    packed: NDArray[np.uint8]
    biases: list[tuple[NDArray[np.float32], int, RowLayout]] = field(default_factory=list)
    """Values, first row and layout for each part. None are needed for a matrix that replaces rows of a checkpoint."""

    def give_to(self, model: NativeModel) -> None:
        """Let a model read the matrix in place. No step may be running."""
        model.use(self.slot, self.layer, self.runs, self.columns, self.packed)
        for values, first, layout in self.biases:
            model.set_bias(self.slot, self.layer, values, first=first, layout=layout)


OnMatrix: TypeAlias = Callable[[PackedMatrix], None]
"""Called with each matrix as soon as it is whole, on any thread."""


class WeightWriter(Protocol):
    """Receives packed weights part by part."""

    def add_matrix(self, slot: Slot, layer: int, runs: Sequence[Run], columns: int, num_bytes: int) -> None:
        """Reserve space for a matrix in the kernels' packed layout. `write` then adds its bytes."""

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return an aligned buffer to pack into, with arbitrary bytes. Give it to `write` before the next one."""

    def write(self, packed: NDArray[np.uint8]) -> None:
        """Take a `buffer` with the next bytes of the last matrix."""

    def add_vector(self, vector: Vector, layer: int, values: NDArray[np.float32]) -> None:
        """Add a vector, with the arguments of `NativeModel.set_vector`."""

    def add_bias(self, slot: Slot, layer: int, values: NDArray[np.float32], first: int, layout: RowLayout) -> None:
        """Add a bias of the last matrix before its last bytes, with the arguments of `NativeModel.set_bias`."""


class PrivateWriter:
    """Keeps packed matrices in this process's memory. The model that gets them has its vectors already."""

    def __init__(self, on_matrix: OnMatrix) -> None:
        self._on_matrix = on_matrix
        self._matrices: list[PackedMatrix] = []
        self._num_written = 0

    def add_matrix(self, slot: Slot, layer: int, runs: Sequence[Run], columns: int, num_bytes: int) -> None:
        """Allocate a matrix. Raises OSError if there is no memory."""
        self._matrices.append(PackedMatrix(slot, layer, runs, columns, pages(num_bytes)))
        self._num_written = 0

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return the next part of the last matrix."""
        return self._matrices[-1].packed[self._num_written :][:num_bytes]

    def write(self, packed: NDArray[np.uint8]) -> None:
        """Hand the last matrix over once it is whole."""
        self._num_written += packed.nbytes
        if self._num_written == self._matrices[-1].packed.nbytes:
            self._on_matrix(self._matrices[-1])

    def add_vector(self, vector: Vector, layer: int, values: NDArray[np.float32]) -> None:
        """Do nothing."""

    def add_bias(self, _slot: Slot, _layer: int, values: NDArray[np.float32], first: int, layout: RowLayout) -> None:
        """Keep a bias with the last matrix."""
        self._matrices[-1].biases.append((values, first, layout))
