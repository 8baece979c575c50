"""Matrices of few bits as checkpoints keep them: numbers, and scales of groups of their columns; no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
NumberKind: TypeAlias = Literal["int4", "int8", "fp8"]


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """Values of scale * (number - zero)."""

    name: str
    kind: NumberKind
    numbers: NDArray[Any]
    """[rows, columns]: int8, for int4 in [-8, 7]; for fp8 the bytes of float8_e4m3fn in uint8."""
    scales: Floats
    """[rows, groups]"""
    zeros: Floats | None
    """[rows, groups]; None where all are 0."""
    group: int
    """Columns that share a scale; the last group may have fewer."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return self.numbers.shape

    @property
    def is_whole(self) -> bool:
        """Whether each number has its scale, and its zero."""
        scales = len(self.numbers), -(-self.shape[1] // self.group)
        return self.scales.shape == scales and (self.zeros is None or self.zeros.shape == scales)

    def take_rows(self, rows: NDArray[np.int32], *_shape: int) -> ScaledTensor:
        """Some of its rows as a matrix of their own, of the shape that they have."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, numbers=self.numbers[rows], scales=self.scales[rows], zeros=zeros)

    def span(self, start: int, end: int) -> ScaledTensor:
        """Its rows from `start` up to `end` as a matrix of their own."""
        zeros = None if self.zeros is None else self.zeros[start:end]
        return replace(self, numbers=self.numbers[start:end], scales=self.scales[start:end], zeros=zeros)

    def to_float32(self) -> Floats:
        """The values."""
        values = _FP8_VALUES[self.numbers] if self.kind == "fp8" else self.numbers.astype(np.float32)
        if self.zeros is not None:
            values -= self._by_column(self.zeros)
        values *= self._by_column(self.scales)
        return values

    def _by_column(self, by_group: Floats) -> Floats:
        # One for a whole row is spread by numpy itself, without another matrix.
        return by_group if self.group >= self.shape[1] else np.repeat(by_group, self.group, axis=1)[:, : self.shape[1]]


def _fp8_values() -> Floats:
    """The number of each byte of float8_e4m3fn (arXiv:2209.05433): no infinities, and NaN where all bits are set."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    sizes = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    sizes[byte & 127 == 127] = np.nan
    return np.where(byte < 128, sizes, -sizes).astype(np.float32)


_FP8_VALUES = _fp8_values()
