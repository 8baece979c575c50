"""Folders of this machine that penstock's processes share, and what takes their place where they cannot be written."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from pathlib import Path

_LOG = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where lies what is made once per machine: $PENSTOCK_CACHE, else ~/.cache/penstock."""
    given = Path(os.environ.get("PENSTOCK_CACHE") or "~/.cache/penstock")
    try:
        return given.expanduser()
    except RuntimeError:
        # A user without a home, as in many containers. Nothing can be made there, which is said where it is tried.
        return Path("/nonexistent/penstock")


def private_folder(instead_of: Path, error: OSError) -> Path:
    """A new folder for this process alone, in place of one that cannot be written; it goes with the process.

    Raises OSError where there is no folder for temporary files either.
    """
    # Not one with a name that is known beforehand: another user could have put a library into it.
    folder = tempfile.mkdtemp(prefix="penstock-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    facts = {"folder": str(instead_of), "reason": str(error), "instead": folder}
    _LOG.warning("the cache folder cannot be written", extra=facts)
    return Path(folder)
