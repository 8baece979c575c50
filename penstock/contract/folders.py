"""Folders of this machine that penstock's processes share."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where lies what is made once per machine: $PENSTOCK_CACHE, else ~/.cache/penstock."""
    return Path(os.environ.get("PENSTOCK_CACHE") or "~/.cache/penstock").expanduser()
