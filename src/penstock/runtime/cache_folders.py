"""The cache folder that penstock's processes on a machine share, a private one if it is not writable, and the state."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from penstock.contract.errors import ConfigError
from penstock.runtime.local_redis import check_private, local_folder
from penstock.runtime.trusted_folders import UntrustedError, trusted_folder

_LOG = logging.getLogger(__package__)
_STEM_BYTES = 100
UNTRUSTED = "another user may write the cache folder, so it is not used"
"""A warning, with the reason and the remedy."""
_NOWHERE = Path("/dev/null/penstock")
"""Neither root nor another user can make this folder. The writer reports it."""


def cache_folder() -> Path:
    """Return the folder of files that are built once per machine: $PENSTOCK_CACHE, else ~/.cache/penstock.

    A user without a home, as in a container with a random user id, has a folder below `/tmp/penstock-UID`.
    """
    if given := os.environ.get("PENSTOCK_CACHE"):
        return _expanded(Path(given)) or _temporary("cache")
    return _in_home(".cache/penstock") or _temporary("cache")


def trusted_cache(name: str) -> Path:
    """Return one of the folders in the cache folder, made if it is missing, with its links resolved.

    Raises OSError if it cannot be made, and UntrustedError, which is one, if another user may write it.
    """
    return trusted_folder(trusted_folder(cache_folder()) / name)


def state_folder() -> Path:
    """Return the folder of what must outlive a process: $XDG_STATE_HOME/penstock, else ~/.local/state/penstock.

    A user without a home has a folder below `/tmp/penstock-UID`, which lives as long as its container.
    """
    if given := os.environ.get("XDG_STATE_HOME"):
        return (_expanded(Path(given)) or _temporary("state")) / "penstock"
    return _in_home(".local/state/penstock") or _temporary("state")


def _in_home(name: str) -> Path | None:
    """Return a folder of the user's home; None if it is not there and this user cannot create it."""
    folder = _expanded(Path("~") / name)
    if folder is None or os.access(folder, os.R_OK | os.X_OK):
        return folder
    # The first one that is there decides. `exists` would raise an error in a folder that may not be entered.
    parent = next((each for each in folder.parents if os.access(each, os.F_OK)), folder)
    return folder if os.access(parent, os.W_OK | os.X_OK) else None


def _expanded(path: Path) -> Path | None:
    try:
        return path.expanduser()
    except RuntimeError:
        # No HOME, and no entry in /etc/passwd.
        return None


def _temporary(name: str) -> Path:
    """Return a folder of this user alone, below that of the local Redis. Others may not have made it beforehand."""
    base = local_folder(None)
    with suppress(OSError):
        base.mkdir(mode=0o700)
    try:
        check_private(base)
    except (OSError, ConfigError):
        return _NOWHERE
    return base / name


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
