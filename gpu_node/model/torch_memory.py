"""Torch's lack of memory by Python's name for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def naming_lack_of_memory() -> Iterator[None]:
    """Raise MemoryError where torch found none; it has an error for cards, and for the host one that its text tells."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        raise
