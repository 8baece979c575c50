"""Access to inputs and outputs: local paths, or whole objects behind fsspec URLs such as s3://, gs:// or memory://.

A store that does not answer for a while is waited for.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from penstock.contract.errors import ConfigError, RequestError
from penstock.runtime.cache_folders import flush_entry, state_folder
from penstock.runtime.trusted_folders import trusted_folder


@contextmanager
def readable(param: str, name: str = "") -> Iterator[None]:
    """Translate OSErrors of files and stores in the block to RequestError.

    `param` is the caller's argument with the file's name. `name` is used in the message if the error names no file.
    """
    try:
        yield
    except OSError as error:
        # An error of a store may hold only a message.
        name = error.filename or name
        message = f"{name}: {error.strerror}" if name and error.strerror else str(error)
        raise RequestError(message, param=param) from error


def is_remote(name: str) -> bool:
    """Return whether `name` is an fsspec URL."""
    return "://" in name


def canonical(name: str) -> str:
    """Return a canonical name: an fsspec URL unchanged, a path resolved to its absolute form."""
    return name if is_remote(name) else str(Path(name).resolve())


@contextmanager
def local_copy(name: str, *, param: str) -> Iterator[Path]:
    """Yield a local file with the content of `name`. It can be read more than once, even if `name` is a pipe.

    A regular local file is used directly; other inputs are copied to a temporary file.
    """
    with readable(param):
        is_local_file = not is_remote(name) and Path(name).is_file()
    if is_local_file:
        yield Path(name)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-batch-") as folder:
        copy = Path(folder) / "copy"
        with (
            readable(param),
            _fsspec_open(name, "rb", param) if is_remote(name) else Path(name).open("rb") as source,
            copy.open("wb") as target,
        ):
            shutil.copyfileobj(source, target)
        yield copy


def exists(name: str) -> bool:
    """Return whether an output already exists."""
    if not is_remote(name):
        return Path(name).exists()
    opened = _fsspec_open(name, "rb", "output")
    with readable("output"):
        return bool(opened.fs.exists(opened.path))


def partial_path(output: str) -> Path:
    """Return the path of the file that grows during a batch.

    It is next to a local output, and in the user's state folder for a remote output. Raises RequestError if the output
    exists and cannot be replaced by a file.
    """
    if not is_remote(output):
        with readable("output"):
            if Path(output).exists() and not Path(output).is_file():
                raise RequestError(f"{output} is not a regular file", param="output")
        return Path(f"{output}.partial")
    state = state_folder() / "batch"
    with readable("output"):
        state = trusted_folder(state, remedy="set XDG_STATE_HOME to a folder of your own")
    return state / f"{hashlib.blake2b(output.encode(), digest_size=16).hexdigest()}.partial"


def publish(partial: Path, output: str) -> None:
    """Move the complete file to its output atomically, and remove the partial file."""
    with readable("output"):
        if not is_remote(output):
            os.replace(partial, output)
            flush_entry(Path(output).parent)
            return
        with partial.open("rb") as source, _fsspec_open(output, "wb", "output") as target:
            shutil.copyfileobj(source, target)
        partial.unlink()


def _fsspec_open(name: str, mode: str, param: str) -> Any:
    try:
        import fsspec

        return fsspec.open(name, mode)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name}: {error.name} is not installed: pip install 'penstock-llm[batch]'", param=param
        ) from error
    except (ImportError, ValueError) as error:
        raise RequestError(f"{name}: {error}", param=param) from error


# Waiting for a store that does not answer for a while.

T = TypeVar("T")
OnWait = Callable[[str], None]
"""Called with the reason for which a batch waits."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
MAX_REASON_CHARS = 200
_LIBRARIES = frozenset({"aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "urllib3"})
"""Packages of stores, whose errors do not derive from OSError."""
_NETWORK = ("Connect", "Connection", "Endpoint", "Timeout", "Unavailable", "SlowDown", "HTTPClient", "ServerError")
"""Parts of the names of errors with which they say that the store cannot be reached."""
_LASTING = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EINVAL, errno.ENOSPC}
)
"""Answers of a store that another attempt does not change."""


def outlast(name: str, call: Callable[[], T], on_wait: OnWait) -> T:
    """Return what `call` returns. While the store of the URL `name` is unreachable, report it and try again."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return call()
        except Exception as error:
            if "://" not in name or not is_outage(error):
                raise
            reason = str(error).strip().partition("\n")[0][:MAX_REASON_CHARS] or type(error).__name__
            on_wait(f"{name} is unreachable ({reason}); next attempt in {pause_s:.0f} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def is_outage(error: BaseException) -> bool:
    """Return whether an error, or one that caused it, says that a store cannot be reached at this moment."""
    return any(_is_of_network(one) for one in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_network(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in _LASTING
    kind = type(error)
    return kind.__module__.partition(".")[0] in _LIBRARIES and any(word in kind.__name__ for word in _NETWORK)
