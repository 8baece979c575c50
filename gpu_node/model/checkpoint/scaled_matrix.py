"""Quantized matrices of checkpoints: low-bit numbers, with scales for groups of columns. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
NumberKind: TypeAlias = Literal["int4", "int8", "fp8"]


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """A quantized matrix with the values scale * (number - zero)."""

    name: str
    kind: NumberKind
    numbers: NDArray[Any]
    """[rows, columns]: int8, within [-8, 7] for int4; uint8 with the bytes of float8_e4m3fn for fp8."""
    scales: Floats
    """[rows, groups]"""
    zeros: Floats | None
    """[rows, groups]; None where all are 0."""
    group: int
    """Columns that share a scale; the last group may have fewer."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows and of columns."""
        return self.numbers.shape

    @property
    def is_whole(self) -> bool:
        """Whether scales and zeros have the shape that rows, columns and group size require."""
        scales = len(self.numbers), -(-self.shape[1] // self.group)
        return self.scales.shape == scales and (self.zeros is None or self.zeros.shape == scales)

    def take_rows(self, rows: NDArray[np.int32], *_shape: int) -> ScaledTensor:
        """Return a matrix of the given rows; ignores `_shape`, which `StoredTensor.take_rows` takes."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, numbers=self.numbers[rows], scales=self.scales[rows], zeros=zeros)

    def span(self, start: int, end: int) -> ScaledTensor:
        """Return a matrix of the rows from `start` to `end` (exclusive)."""
        zeros = None if self.zeros is None else self.zeros[start:end]
        return replace(self, numbers=self.numbers[start:end], scales=self.scales[start:end], zeros=zeros)

    def columns(self, start: int, end: int) -> ScaledTensor:
        """Return a matrix of the columns from `start` to `end` (exclusive)."""
        numbers = self.numbers[:, start:end]
        if self.group >= self.shape[1]:
            return replace(self, numbers=numbers)
        # Smaller groups, where the cut is inside of one.
        group = gcd(start, self.group)

        def cut(by_group: Floats) -> Floats:
            return np.repeat(by_group, self.group // group, axis=1)[:, start // group : -(-end // group)]

        zeros = None if self.zeros is None else cut(self.zeros)
        return replace(self, numbers=numbers, scales=cut(self.scales), zeros=zeros, group=group)

    def to_float32(self) -> Floats:
        """Return the dequantized values."""
        values = FP8_VALUES[self.numbers] if self.kind == "fp8" else self.numbers.astype(np.float32)
        if self.zeros is not None:
            values -= self._by_column(self.zeros)
        values *= self._by_column(self.scales)
        return values

    def _by_column(self, by_group: Floats) -> Floats:
        # numpy broadcasts a single scale per row without another matrix.
        return by_group if self.group >= self.shape[1] else np.repeat(by_group, self.group, axis=1)[:, : self.shape[1]]


def _fp8_values() -> Floats:
    """Return the value of each float8_e4m3fn byte (arXiv:2209.05433).

    The format has no infinities; a byte with all bits but the sign set is NaN.
    """
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    sizes = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    sizes[byte & 127 == 127] = np.nan
    return np.where(byte < 128, sizes, -sizes).astype(np.float32)


FP8_VALUES = _fp8_values()
