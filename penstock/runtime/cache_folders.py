"""The cache folder that penstock's processes on a machine share, a private one if it is not writable, and the state."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from pathlib import Path

from penstock.runtime.trusted_folders import UntrustedError, trusted_folder

_LOG = logging.getLogger(__package__)
_STEM_BYTES = 100
UNTRUSTED = "another user may write the cache folder, so it is not used"
"""A warning, with the reason and the remedy."""


def cache_folder() -> Path:
    """Return the folder of files that are built once per machine: $PENSTOCK_CACHE, else ~/.cache/penstock."""
    given = Path(os.environ.get("PENSTOCK_CACHE") or "~/.cache/penstock")
    try:
        return given.expanduser()
    except RuntimeError:
        # The user has no home folder, as in many containers. Writing to this path fails, and the writer reports it.
        return Path("/nonexistent/penstock")


def trusted_cache(name: str) -> Path:
    """Return one of the folders in the cache folder, made if it is missing, with its links resolved.

    Raises OSError if it cannot be made, and UntrustedError, which is one, if another user may write it.
    """
    return trusted_folder(trusted_folder(cache_folder()) / name)


def state_folder() -> Path:
    """Return the folder of what must outlive a process: $XDG_STATE_HOME/penstock, else ~/.local/state/penstock."""
    given = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
    try:
        return given.expanduser() / "penstock"
    except RuntimeError:
        return Path("/nonexistent/penstock")


def file_stem(name: str) -> str:
    """Return the beginning of a name, for a file whose name has more parts: file systems allow 255 bytes."""
    return name.encode()[:_STEM_BYTES].decode(errors="ignore")


def flush(path: Path) -> None:
    """Wait until a file, or all files of a folder, are on disk. Raises OSError.

    A file that is renamed before its content is on disk may be empty after a power failure.
    """
    for each in [path, *path.rglob("*")] if path.is_dir() else [path]:
        flush_entry(each)


def flush_entry(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_folder(instead_of: Path, error: OSError) -> Path:
    """Create a folder for this process alone, to replace one that is unusable, and log a warning.

    The folder is removed when the process exits. Raises OSError if the folder for temporary files is not writable.
    """
    # The name must not be predictable: another user could put a malicious library into the folder beforehand.
    folder = tempfile.mkdtemp(prefix="penstock-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    facts = {"folder": str(instead_of), "reason": str(error), "instead": folder}
    if isinstance(error, UntrustedError):
        _LOG.warning(UNTRUSTED, extra=facts)
    else:
        _LOG.warning("the cache folder cannot be written", extra=facts)
    return Path(folder)
