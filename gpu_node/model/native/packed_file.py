"""The file format of packed weights: written once, then memory-mapped and read by the kernels in place.

The file has one page of header, page-aligned matrices, float32 vectors aligned to cache lines, and a JSON table of
contents. The header holds the file's size and checksums of itself and the table, so truncated or foreign files are
rejected. Matrices are copied into the page cache while the next ones are packed. Writing a file to disk takes longer
than that, so a new file is used before it is done. Until then its header names the boot of the machine, and after
another boot the file is rejected.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.checkpoint.mapped_file import PageFaults
from penstock.gpu_node.model.native.packed_matrix import BackgroundWriter, OnMatrix, PackedMatrix, write_at
from penstock.gpu_node.model.native.placement import NumaPlacement, bytes_of, panel_starts
from penstock.kernels.cpu.library import NativeModel, Slot, Vector
from penstock.kernels.cpu.structs import Format, RowLayout, Run

KEY_DIGITS = 32
_MAGIC = b"penstock weights"
_HEADER = struct.Struct(f"<{len(_MAGIC)}s{KEY_DIGITS}sQQ16s36s")
"""Magic, key, start of the table, end of the file, digest of the table, boot. The header's own digest follows."""
_ON_DISK = bytes(36)
"""Instead of a boot: the whole file is on disk."""
_PAGE = 4096
_LINE = 64


PanelsOf: TypeAlias = Callable[[Slot, int], Sequence[int]]


class PackedWriter:
    """Writes a file of packed weights; the file is valid only after `finish`."""

    def __init__(self, file: BinaryIO, key: str, on_matrix: OnMatrix | None = None) -> None:
        """key: identifies the source of the weights, `KEY_DIGITS` characters.

        on_matrix: gets each matrix, mapped from the file, once it is written.
        """
        self._file = file
        self._key = key
        self._on_matrix = on_matrix
        self._table: dict[str, list[list[Any]]] = {"matrices": [], "vectors": [], "biases": []}
        self._end = _PAGE
        self._next_packed = 0
        self._buffers = BackgroundWriter(file.fileno())

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffers.close()

    def add_matrix(self, slot: Slot, layer: int, runs: Sequence[Run], columns: int, num_bytes: int) -> None:
        """Reserve space for a matrix in the kernels' packed layout. `write` then adds its bytes."""
        self._next_packed = self._reserve(num_bytes, _PAGE)
        self._table["matrices"].append([slot, layer, runs, columns, self._next_packed, num_bytes])

    def buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return a page-aligned buffer to pack into, with arbitrary bytes. Give it to `write` before the next one."""
        return self._buffers.take(num_bytes)

    def write(self, packed: NDArray[np.uint8]) -> None:
        """Begin to write a `buffer` with the next bytes of the last matrix. Later calls raise OSError if it fails."""
        *_, start, size = matrix = self._table["matrices"][-1]
        is_last = self._next_packed + packed.nbytes == start + size
        then = partial(self._hand_over, self._on_matrix, *matrix) if is_last and self._on_matrix is not None else None
        self._buffers.write(packed, self._next_packed, then)
        self._next_packed += packed.nbytes

    def add_vector(self, vector: Vector, layer: int, values: NDArray[np.float32]) -> None:
        """Add a vector, with the arguments of `NativeModel.set_vector`."""
        self._table["vectors"].append([vector, layer, self._put(values), values.nbytes])

    def add_bias(self, slot: Slot, layer: int, values: NDArray[np.float32], first: int, layout: RowLayout) -> None:
        """Add a bias, with the arguments of `NativeModel.set_bias`."""
        self._table["biases"].append([slot, layer, first, layout, self._put(values), values.nbytes])

    def finish(self, formats: Iterable[Format]) -> None:
        """Write the table and the header. The file is not on disk yet: see `flush_to_disk`."""
        self._buffers.wait()
        table = json.dumps(self._table | {"formats": sorted(formats)}).encode()
        start = self._put(np.frombuffer(table, np.uint8))
        header = _HEADER.pack(_MAGIC, self._key.encode(), start, self._end, _digest(table), boot_id())
        write_at(self._file.fileno(), header + _digest(header), 0)

    def _hand_over(
        self, on_matrix: OnMatrix, slot: Slot, layer: int, runs: Sequence[Run], columns: int, start: int, size: int
    ) -> None:
        mapped = mmap.mmap(self._file.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)
        on_matrix(PackedMatrix(slot, layer, runs, columns, np.frombuffer(mapped, np.uint8)))

    def _reserve(self, num_bytes: int, alignment: int) -> int:
        """Return the next aligned offset, which `num_bytes` bytes follow."""
        start = -(-self._end // alignment) * alignment
        self._end = start + num_bytes
        return start

    def _put(self, values: NDArray[Any]) -> int:
        """Write values at the next aligned offset and return that offset."""
        start = self._reserve(values.nbytes, _LINE)
        write_at(self._file.fileno(), np.ascontiguousarray(values).data.cast("B"), start)
        return start


class PackedWeights:
    """A memory-mapped file of packed weights. All processes that map it share the same physical pages."""

    def __init__(self, mapped: mmap.mmap, table: dict[str, list[Any]]) -> None:
        self._map = mapped
        self._content = np.frombuffer(mapped, np.uint8)
        self._table = table
        self._placed: dict[int, NDArray[np.uint8]] = {}
        """Copies of matrices near their threads, by the offset of the matrix."""
        self.formats = {Format(number) for number in table["formats"]}
        """The formats of the matrices."""

    @classmethod
    def open(cls, path: Path, key: str) -> PackedWeights:
        """Map a file. Raises OSError if it cannot be read, ValueError if it is damaged or has another key."""
        with path.open("rb") as file:
            return cls.mapped(file, key)

    @classmethod
    def mapped(cls, file: BinaryIO, key: str) -> PackedWeights:
        """Map an open file, as `open` does. Ranks that share its descriptor may do so at the same time."""
        file.flush()
        # They share its position too, so nothing is read from there.
        header = os.pread(file.fileno(), _PAGE, 0)
        start, end = _table_span(header, key)
        if (num_bytes := os.fstat(file.fileno()).st_size) != end:
            raise ValueError(f"the file has {num_bytes} bytes, its header says {end}")
        mapped = mmap.mmap(file.fileno(), end, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        table = mapped[start:end]
        *_, table_digest, boot = _HEADER.unpack_from(header)
        if _digest(table) != table_digest:
            raise ValueError("the table of contents is damaged")
        if boot not in (_ON_DISK, boot_id()):
            raise ValueError("the machine restarted before the whole file was on disk")
        with suppress(OSError):  # Some Linux kernels do not support it.
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return cls(mapped, json.loads(table))

    @classmethod
    def of_descriptor(cls, descriptor: int, key: str) -> PackedWeights:
        """Map a file by a descriptor, which stays open, as `open` does."""
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return cls.mapped(file, key)

    def read_ahead(self, panels_of: PanelsOf | None = None) -> None:
        """Ask Linux to read the file's pages soon. panels_of: as for `place`; a rank's memory may hold only its own."""
        if panels_of is None:
            self._will_need(0, len(self._content))
            return
        for begin, end in self._parts(panels_of):
            self._will_need(begin, end)

    def rank_bytes(self, panels_of: PanelsOf) -> int:
        """Return the size of what a rank computes with. panels_of: as for `place`."""
        return sum(end - begin for begin, end in self._parts(panels_of))

    def _parts(self, panels_of: PanelsOf) -> Iterator[tuple[int, int]]:
        """Yield where each part of the file that a rank needs begins and ends."""
        for slot, layer, runs, columns, start, _ in self._table["matrices"]:
            starts = panel_starts([(Format(weights), rows) for weights, rows in runs], columns)
            yield from ((start + begin, start + end) for begin, end in bytes_of(panels_of(Slot(slot), layer), starts))

    def _will_need(self, begin: int, end: int) -> None:
        begin -= begin % _PAGE
        with suppress(OSError):  # Some Linux kernels do not support it.
            self._map.madvise(mmap.MADV_WILLNEED, begin, end - begin)

    def place(self, placement: NumaPlacement, panels_of: PanelsOf | None = None) -> None:
        """Copy the matrices into memory near the threads that compute them, if these are on several NUMA nodes.

        panels_of: returns the panels of a layer's matrix that a rank computes; all of them without ranks.
        """
        for slot, layer, runs, columns, start, size in self._table["matrices"] if placement.copies else ():
            formats = [(Format(weights), rows) for weights, rows in runs]
            panels = None if panels_of is None else panels_of(Slot(slot), layer)
            self._placed[start] = placement.placed(formats, columns, self._content[start : start + size], panels)

    def give_to(self, model: NativeModel) -> None:
        """Let a model read the matrices in place, and set its biases and vectors."""
        for slot, layer, runs, columns, start, size in self._table["matrices"]:
            packed = self._placed.get(start, self._content[start : start + size])
            model.use(Slot(slot), layer, [(Format(weights), rows) for weights, rows in runs], columns, packed)
        for slot, layer, first, layout, start, size in self._table["biases"]:
            model.set_bias(Slot(slot), layer, self._numbers(start, size), first=first, layout=RowLayout(layout))
        for vector, layer, start, size in self._table["vectors"]:
            model.set_vector(Vector(vector), layer, self._numbers(start, size))

    def fault_in(self, is_enough: Callable[[], bool]) -> None:
        """Map the file's pages, until `is_enough`."""
        PageFaults(self._content).take(is_enough)

    def _numbers(self, start: int, size: int) -> NDArray[np.float32]:
        return self._content[start : start + size].view(np.float32)


def boot_id() -> bytes:
    """Return the id of the machine's current boot, 36 bytes."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()[:36]


def flush_to_disk(path: Path) -> None:
    """Wait until a whole file is on disk, then say so in its header. Raises OSError."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        header = file.read(_HEADER.size)[: -len(_ON_DISK)] + _ON_DISK
        file.seek(0)
        file.write(header + _digest(header))
        file.flush()
        os.fsync(file.fileno())


def _table_span(header: bytes, key: str) -> tuple[int, int]:
    """Return the start of the table, and its end, which is also the end of the file. Raises ValueError."""
    fixed, digest = header[: _HEADER.size], header[_HEADER.size :][:16]
    if not header.startswith(_MAGIC) or _digest(fixed) != digest:
        raise ValueError("the file has no valid header of packed weights")
    _, its_key, start, end, *_ = _HEADER.unpack(fixed)
    if its_key != key.encode():
        raise ValueError("the file was packed from other weights")
    return start, end


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()
