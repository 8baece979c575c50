"""Where inputs and outputs lie: plain paths, or whatever fsspec knows (s3://, gs://, memory://) as whole objects."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError, RequestError


@contextmanager
def readable(param: str, name: str = "") -> Iterator[None]:
    """Turns what files and stores raise into RequestError; `param` is what the caller named them by, and `name` stands
    in the message where the error names no file.
    """
    try:
        yield
    except OSError as error:
        # Of a store there may be no more than the message.
        name = error.filename or name
        said = f"{name}: {error.strerror}" if name and error.strerror else str(error)
        raise RequestError(said, param=param) from error


def is_remote(name: str) -> bool:
    """Whether `name` is for fsspec."""
    return "://" in name


def canonical(name: str) -> str:
    """The same text for the same place."""
    return name if is_remote(name) else str(Path(name).resolve())


@contextmanager
def local_copy(name: str, *, param: str) -> Iterator[Path]:
    """A file on this machine with what lies at `name`, which can be read more than once, as a pipe cannot."""
    with readable(param):
        is_here = not is_remote(name) and Path(name).is_file()
    if is_here:
        yield Path(name)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-batch-") as folder:
        copy = Path(folder) / "copy"
        with readable(param), _open(name, param) as source, copy.open("wb") as target:
            shutil.copyfileobj(source, target)
        yield copy


def exists(name: str) -> bool:
    """Whether something lies at an output's place."""
    if not is_remote(name):
        return Path(name).exists()
    opened = _fsspec_open(name, "rb", "output")
    with readable("output"):
        return bool(opened.fs.exists(opened.path))


def partial_path(output: str) -> Path:
    """The file that grows while a batch runs: beside a local output, in the user's state folder for a remote one.

    Raises RequestError for an output that a whole file cannot be put in place of.
    """
    if not is_remote(output):
        with readable("output"):
            if Path(output).exists() and not Path(output).is_file():
                raise RequestError(f"{output} is no regular file", param="output")
        return Path(f"{output}.partial")
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "penstock/batch"
    with readable("output"):
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    return state / f"{hashlib.blake2b(output.encode(), digest_size=16).hexdigest()}.partial"


def publish(partial: Path, output: str) -> None:
    """Puts the whole file at its place at once; the partial file is gone then."""
    with readable("output"):
        if not is_remote(output):
            os.replace(partial, output)
            _sync_folder(Path(output).parent)
            return
        with partial.open("rb") as source, _fsspec_open(output, "wb", "output") as target:
            shutil.copyfileobj(source, target)
        partial.unlink()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(name: str, param: str) -> Any:
    return _fsspec_open(name, "rb", param) if is_remote(name) else Path(name).open("rb")


def _fsspec_open(name: str, mode: str, param: str) -> Any:
    try:
        import fsspec

        return fsspec.open(name, mode)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name}: {error.name} is not installed: pip install 'penstock[batch]'", param=param
        ) from error
    except (ImportError, ValueError) as error:
        raise RequestError(f"{name}: {error}", param=param) from error
