"""The cache of packed weights: the first process packs a file, and all processes of the machine share it."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from threading import Thread
from typing import BinaryIO, NamedTuple, TypeAlias

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.description import Description, stamps_of, weights_revision_of
from penstock.gpu_node.model.checkpoint.stored_tensors import weight_files
from penstock.gpu_node.model.native.packed_file import PackedWeights, PackedWriter, flush_to_disk
from penstock.gpu_node.model.native.packed_matrix import OnMatrix
from penstock.kernels.cpu.structs import Format
from penstock.runtime.cache_folders import file_stem, trusted_cache
from penstock.runtime.trusted_folders import check_file, open_own

log = logging.getLogger(__package__)


_UNUSED_S = 7 * 24 * 60 * 60
"""Files that no process opened for this long are deleted when another file is written."""
_SUFFIX = ".weights"
_PART = ".part"
_NOT_SHARED = "packed weights are not shared with other processes"

Pack: TypeAlias = Callable[[PackedWriter], Iterable[Format]]


class WeightCache:
    """The cached file of a model's packed weights in one layout."""

    def __init__(self, described: Description, layout: str) -> None:
        self._described = described
        self._stamps = _stamps(described)
        self._key = _key(described, layout)
        self._needed_bytes = 2 * sum(path.stat().st_size for path in weight_files(described.source))
        name = re.sub(r"[^\w.-]+", "-", (described.source.gguf or described.source.folder.resolve()).name)
        self._name = f"{file_stem(name)}-{self._key}{_SUFFIX}"

    def opened(self) -> PackedWeights | None:
        """Return the packed weights, or None if they are not packed yet or cannot be read."""
        with suppress(OSError):
            return _opened(self._path(), self._key)
        return None

    def _path(self) -> Path:
        """Return the file's path. Raises OSError if the folder is missing and cannot be made, or is not trusted."""
        return trusted_cache("weights") / self._name

    @property
    def key(self) -> str:
        """The key of the file."""
        return self._key

    def descriptor(self) -> int | None:
        """Return a descriptor of the file, for other processes to map; None if it cannot be read. The caller closes."""
        with suppress(OSError):
            return os.open(self._path(), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return None

    def is_current(self) -> bool:
        """Return whether the checkpoint's paths still lead to the files that this is for. If not, log a warning."""
        with suppress(OSError, ConfigError):
            if _stamps(self._described) == self._stamps:
                return True
        log.warning(_NOT_SHARED, extra={"reason": "the checkpoint was replaced while it was loaded"})
        return False

    def packed_once(
        self, pack: Pack, wait: Callable[[], None], on_matrix: OnMatrix | None = None
    ) -> PackedWeights | None:
        """Return the packed weights; pack them first if no process has.

        `pack` writes all weights to the given writer and returns their formats. `on_matrix` gets each matrix once it is
        written. If several processes start together, one packs and the others call `wait` until it is done. If the
        cache folder is unusable, logs a warning and returns None.
        """
        try:
            return _packed(self._path(), self._key, lambda part: self._write(part, pack, on_matrix), wait)
        except OSError as error:
            log.warning(_NOT_SHARED, extra={"reason": str(error)})
            return None

    def _write(self, part: _Part, pack: Pack, on_matrix: OnMatrix | None) -> PackedWeights:
        """Pack into a locked file, then rename it."""
        # Truncate first: what a killed process left must neither be swept as an old file nor take disk space.
        part.file.truncate(0)
        folder = part.path.parent
        _sweep(folder, time.time() - _UNUSED_S)
        # Do not fill up the disk for other programs.
        if (free := shutil.disk_usage(folder).free) < self._needed_bytes:
            raise OSError(f"{folder} has {free >> 20} MiB free; {self._needed_bytes >> 20} are needed")
        with PackedWriter(part.file, self._key, on_matrix) as writer:
            writer.finish(pack(writer))
        if part.is_in_place():
            path = part.path.rename(part.path.with_name(self._name))
            Thread(target=_flush, args=(path,), name="penstock-flush", daemon=True).start()
        else:
            log.warning(_NOT_SHARED, extra={"reason": f"{part.path} was removed"})
        return PackedWeights.mapped(part.file, self._key)


def _key(described: Description, layout: str) -> str:
    """Return a digest of everything the packed bytes depend on: weight files, kernels, and the loading code."""
    code = blake2b(digest_size=16)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    changed_ns = [path.stat().st_mtime_ns for path in weight_files(described.source)]
    return weights_revision_of(described.source, repr((layout, described.spec, code.hexdigest(), changed_ns)))


def _stamps(described: Description) -> list[tuple[int, ...]]:
    """Return the stamps of the weight files, which change when one of them is written or replaced."""
    return stamps_of(weight_files(described.source))


def _opened(path: Path, key: str) -> PackedWeights | None:
    try:
        check_file(path)
        found = PackedWeights.open(path, key)
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("packed weights are made anew", extra={"path": str(path), "reason": str(error)})
        return None
    # Mark the file as used. That fails, harmlessly, for a file of another user.
    with suppress(OSError):
        os.utime(path)
    return found


class _Part(NamedTuple):
    """The temporary file that one process at a time fills."""

    path: Path
    file: BinaryIO

    def is_in_place(self) -> bool:
        """Return whether the path leads to this file: another process may have renamed or removed it."""
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False


def _packed(path: Path, key: str, write: Callable[[_Part], PackedWeights], wait: Callable[[], None]) -> PackedWeights:
    """Lock the temporary file and write it, unless the process that had the lock before did. `wait` for the lock."""
    part_path = path.with_suffix(_PART)
    while True:
        with os.fdopen(open_own(part_path, 0o644), "r+b") as file:
            while not _is_locked(file.fileno()):
                wait()
            part = _Part(part_path, file)
            try:
                if part.is_in_place():
                    return _opened(path, key) or write(part)
            finally:
                if part.is_in_place():
                    part_path.unlink()
                # Closing the file would not release the lock as long as a mapping of the file is left.
                fcntl.flock(file.fileno(), fcntl.LOCK_UN)


def _is_locked(descriptor: int) -> bool:
    """Try to lock a file; return whether that worked."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _flush(path: Path) -> None:
    # A file that was removed or replaced, or is not flushed for another reason, is packed again after a reboot.
    with suppress(OSError):
        flush_to_disk(path)


def _sweep(folder: Path, before_s: float) -> None:
    """Remove files that were not used since `before_s`. Processes that map a removed file keep their mapping."""
    for path in folder.iterdir():
        # Another process may sweep at the same time.
        with suppress(OSError):
            if path.suffix in (_SUFFIX, _PART) and path.stat().st_mtime < before_s:
                path.unlink()
