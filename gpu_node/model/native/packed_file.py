"""Packed weights as a file: written once, then read by the kernels where it is mapped.

A page of header, then matrices on pages of their own and float32 vectors on lines, then a table of them in JSON. The
header has checksums of itself and of the table, and the file's size: what was cut short or written by others is known.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.library import Format, NativeModel, Place, Slot, Vector

KEY_DIGITS = 32
_MAGIC = b"penstock weights"
_HEADER = struct.Struct(f"<{len(_MAGIC)}s{KEY_DIGITS}sQQ16s")
"""Magic, key, start of the table, end of the file, digest of the table; a digest of all that follows."""
_PAGE = 4096
_LINE = 64


class PackedWriter:
    """Writes one such file; it is none before `finish`."""

    def __init__(self, file: BinaryIO, key: str) -> None:
        """`key`, of `KEY_DIGITS` digits, says what the weights were made of."""
        self._file = file
        self._key = key
        self._table: dict[str, list[list[int]]] = {"matrices": [], "vectors": [], "biases": []}
        file.seek(_PAGE)

    def add_matrix(
        self, slot: Slot, layer: int, weights: Format, rows: int, columns: int, packed: NDArray[np.uint8]
    ) -> None:
        """A matrix as the kernels packed it."""
        start = self._put(packed, _PAGE)
        self._table["matrices"].append([slot, layer, weights, rows, columns, start, packed.nbytes])

    def add_vector(self, vector: Vector, layer: int, values: NDArray[np.float32]) -> None:
        """What `set_vector` was given."""
        self._table["vectors"].append([vector, layer, self._put(values, _LINE), values.nbytes])

    def add_bias(self, slot: Slot, layer: int, values: NDArray[np.float32], first: int, place: Place) -> None:
        """What `set_bias` was given."""
        self._table["biases"].append([slot, layer, first, place, self._put(values, _LINE), values.nbytes])

    def finish(self, formats: Iterable[Format]) -> None:
        """The table and the header; all of it is on disk afterwards."""
        table = json.dumps(self._table | {"formats": sorted(formats)}).encode()
        start = self._put(np.frombuffer(table, np.uint8), _LINE)
        header = _HEADER.pack(_MAGIC, self._key.encode(), start, self._file.tell(), _digest(table))
        self._file.seek(0)
        self._file.write(header + _digest(header))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _put(self, values: NDArray[Any], alignment: int) -> int:
        """Where the values begin."""
        start = -(-self._file.tell() // alignment) * alignment
        self._file.seek(start)
        # Large pieces at once, for which the system finds large pages.
        self._file.write(np.ascontiguousarray(values).data.cast("B"))
        return start


class PackedWeights:
    """Such a file, mapped. Its pages are the system's: those of all processes that read it are the same."""

    def __init__(self, content: NDArray[np.uint8], table: dict[str, list[Any]]) -> None:
        self._content = content
        self._table = table
        self.formats = {Format(number) for number in table["formats"]}
        """Which the matrices are kept in."""

    @classmethod
    def open(cls, path: Path, key: str) -> PackedWeights:
        """Map a file. Raises OSError where none can be read, ValueError for one that is not whole or of this key."""
        with path.open("rb") as file:
            header = file.read(_PAGE)
            start, end = _table_span(header, key)
            if file.seek(0, os.SEEK_END) != end:
                raise ValueError(f"has {file.tell()} bytes, its header says {end}")
            mapped = mmap.mmap(file.fileno(), end, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        table = mapped[start:end]
        if _digest(table) != _HEADER.unpack_from(header)[-1]:
            raise ValueError("its table of contents is damaged")
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_WILLNEED):
            # Not every kernel takes both.
            with suppress(OSError):
                mapped.madvise(advice)
        return cls(np.frombuffer(mapped, np.uint8), json.loads(table))

    def give_to(self, model: NativeModel) -> None:
        """Have a model read the matrices where they lie, and its vectors be as they were."""
        for slot, layer, weights, rows, columns, start, size in self._table["matrices"]:
            packed = self._content[start : start + size]
            model.use(Slot(slot), layer, Format(weights), rows, columns, packed)
        for slot, layer, first, place, start, size in self._table["biases"]:
            model.set_bias(Slot(slot), layer, self._numbers(start, size), first=first, place=Place(place))
        for vector, layer, start, size in self._table["vectors"]:
            model.set_vector(Vector(vector), layer, self._numbers(start, size))

    def _numbers(self, start: int, size: int) -> NDArray[np.float32]:
        return self._content[start : start + size].view(np.float32)


def _table_span(header: bytes, key: str) -> tuple[int, int]:
    """Where the table begins and where it and the file end. Raises ValueError."""
    fixed, digest = header[: _HEADER.size], header[_HEADER.size :][:16]
    if not header.startswith(_MAGIC) or _digest(fixed) != digest:
        raise ValueError("has no header of packed weights")
    _, its_key, start, end, _ = _HEADER.unpack(fixed)
    if its_key != key.encode():
        raise ValueError("was made of other weights")
    return start, end


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()
