"""The folder of what was converted once: each entry is built beside its place and moved there whole."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from penstock.contract.errors import ConfigError
from penstock.runtime.cache_folders import cache_folder as cache_folder
from penstock.runtime.cache_folders import private_folder

_BUILDING_S = 24 * 60 * 60
"""A conversion older than this is not under way: its process died."""
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def built_once(name: str, build: Callable[[Path], None]) -> Path:
    """The cached folder called `name`; where there is none, `build` writes it to the path that it is given.

    Two processes may race, and either may die half way: what others see is whole or not there. Where the cache cannot
    be written, it is built for this process alone. Raises ConfigError where nothing can be written at all.
    """
    folder = cache_folder() / "models" / name
    if folder.is_dir():
        return folder
    try:
        building = _building_folder(folder)
    except OSError as error:
        try:
            folder = private_folder(folder.parent, error) / name
            building = _building_folder(folder)
        except OSError:
            raise ConfigError(f"PENSTOCK_CACHE: {error}; set it to a folder that can be written") from error
    with building as beside:
        built = Path(beside) / "model"
        build(built)
        try:
            built.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(built)
    return folder


def _building_folder(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder beside the one to be built; raises OSError where none can be made."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent, time.time() - _BUILDING_S)
    return tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent)


def samples(path: Path) -> Iterator[bytes]:
    """A file's size and pieces spread over it: enough to tell files apart without reading all of a large one."""
    size = path.stat().st_size
    yield str(size).encode()
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)


def _sweep(models: Path, before_s: float) -> None:
    """Remove what conversions that died before a time left half built."""
    for left in models.glob(".*"):
        # Another process may sweep, or finish, at the same time.
        with suppress(OSError):
            if left.stat().st_mtime < before_s:
                shutil.rmtree(left)
