"""The cache of converted models: each entry is built in a temporary folder and then renamed into the cache."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from penstock.contract.errors import ConfigError
from penstock.runtime.cache_folders import cache_folder as cache_folder
from penstock.runtime.cache_folders import flush, private_folder

_BUILDING_S = 24 * 60 * 60
"""A temporary folder older than this belongs to a process that died."""
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def built_once(name: str, build: Callable[[Path], None]) -> Path:
    """Return the cached folder `name`; if there is none, `build` writes it to the path that it receives.

    Safe against races and crashes: other processes see the whole folder or none. If the cache cannot be written, the
    folder is built for this process only. Raises ConfigError if no folder can be written.
    """
    folder = cache_folder() / "models" / name
    try:
        # Raises an error too: in the home of another user, which may not be entered.
        if folder.is_dir():
            return folder
        building = _building_folder(folder)
    except OSError as error:
        try:
            folder = private_folder(folder.parent, error) / name
            building = _building_folder(folder)
        except OSError:
            raise ConfigError(f"PENSTOCK_CACHE: {error}; set it to a folder that can be written") from error
    with building as temporary:
        built = Path(temporary) / "model"
        build(built)
        flush(built)
        try:
            built.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(built)
    return folder


def _building_folder(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder next to `folder`. Raises OSError if it cannot be created."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent, time.time() - _BUILDING_S)
    return tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent)


def samples(path: Path) -> Iterator[bytes]:
    """Yield a file's size and samples spread over it, which tell files apart without reading a large file."""
    size = path.stat().st_size
    yield str(size).encode()
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)


def _sweep(models: Path, before_s: float) -> None:
    """Remove temporary folders that were last changed before `before_s`; their conversions died."""
    for left in models.glob(".*"):
        # Another process may sweep, or finish, at the same time.
        with suppress(OSError):
            if left.stat().st_mtime < before_s:
                shutil.rmtree(left)
