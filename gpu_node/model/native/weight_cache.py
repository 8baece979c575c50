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

from penstock.gpu_node.model.architecture.description import Description
from penstock.gpu_node.model.checkpoint.conversion_cache import cache_folder
from penstock.gpu_node.model.checkpoint.files import weight_files
from penstock.gpu_node.model.checkpoint.revision import revision_of
from penstock.gpu_node.model.native.packed_file import PackedWeights, PackedWriter, flush_to_disk
from penstock.kernels.cpu.formats import Format

_log = logging.getLogger(__name__)
_UNUSED_S = 7 * 24 * 60 * 60
"""Files that no process opened for this long are deleted when another file is written."""
_SUFFIX = ".weights"
_PART = ".part"


class WeightCache:
    """The cached file of a model's packed weights in one layout."""

    def __init__(self, described: Description, layout: str) -> None:
        self._key = _key(described, layout)
        self._needed_bytes = 2 * _num_bytes(described)
        name = re.sub(r"[^\w.-]+", "-", (described.source.gguf or described.source.folder.resolve()).name)
        self._path = cache_folder() / "weights" / f"{name}-{self._key}{_SUFFIX}"

    def opened(self) -> PackedWeights | None:
        """Return the packed weights, or None if they are not packed yet or cannot be read."""
        with suppress(OSError):
            return _opened(self._path, self._key)
        return None

    def packed_once(
        self, pack: Callable[[PackedWriter], Iterable[Format]], wait: Callable[[], None]
    ) -> PackedWeights | None:
        """Return the packed weights; pack them first if no process has.

        `pack` writes all weights to the given writer and returns their formats. If several processes start together,
        one packs and the others call `wait` until it is done. If the cache folder is unusable, logs a warning and
        returns None.
        """
        try:
            return _packed(self._path, self._key, pack, self._needed_bytes, wait)
        except OSError as error:
            _log.warning("packed weights are not shared with other processes", extra={"reason": str(error)})
            return None


def _key(described: Description, layout: str) -> str:
    """Return a digest of everything the packed bytes depend on: weight files, kernels, and the loading code."""
    code = blake2b(digest_size=16)
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    changed_ns = [path.stat().st_mtime_ns for path in weight_files(described.source)]
    return revision_of(described.source, repr((layout, described.spec, code.hexdigest(), changed_ns)))


def _num_bytes(described: Description) -> int:
    return sum(path.stat().st_size for path in weight_files(described.source))


def _opened(path: Path, key: str) -> PackedWeights | None:
    try:
        found = PackedWeights.open(path, key)
    except FileNotFoundError:
        return None
    except ValueError as error:
        _log.warning("packed weights are made anew", extra={"path": str(path), "reason": str(error)})
        return None
    # Mark the file as used. That fails, harmlessly, for a file of another user.
    with suppress(OSError):
        os.utime(path)
    return found


def _packed(
    path: Path, key: str, pack: Callable[[PackedWriter], Iterable[Format]], needed_bytes: int, wait: Callable[[], None]
) -> PackedWeights | None:
    """Pack into a locked temporary file, then rename it to `path`. The lock ends when its writer dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(_PART)
    while True:
        # Closing the file or the end of the process releases the lock.
        with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
            while not _is_locked(file.fileno()):
                wait()
            if not _is_at(file.fileno(), part):
                # The previous holder of the lock renamed or removed the file.
                continue
            found = _opened(path, key)
            try:
                if found is None:
                    _sweep(path.parent, time.time() - _UNUSED_S)
                    _require_free_space(path.parent, needed_bytes)
                    file.truncate(0)
                    with PackedWriter(file, key) as writer:
                        writer.finish(pack(writer))
                    part.rename(path)
                    Thread(target=_flush, args=(path,), name="penstock-flush", daemon=True).start()
            finally:
                part.unlink(missing_ok=True)
        return found or PackedWeights.open(path, key)


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


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _require_free_space(folder: Path, num_bytes: int) -> None:
    """Raise OSError if the disk has less than `num_bytes` free, rather than fill it up for other programs."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(f"{folder} has {free >> 20} MiB free; {num_bytes >> 20} are needed")


def _sweep(folder: Path, before_s: float) -> None:
    """Remove files that were not used since `before_s`. Processes that map a removed file keep their mapping."""
    for path in folder.iterdir():
        # Another process may sweep at the same time.
        with suppress(OSError):
            if path.suffix in (_SUFFIX, _PART) and path.stat().st_mtime < before_s:
                path.unlink()
