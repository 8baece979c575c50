"""Torch's lack of memory by Python's name for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TEXTS = "can't allocate memory", "CUDA error: out of memory", "[CUDA]: out of memory"
"""Of torch for the host; of torch for pinned memory, libraries and graphs; of Triton for kernels."""


@contextmanager
def naming_lack_of_memory() -> Iterator[None]:
    """Raise MemoryError where torch found none; it has an error for cards, and for the host one that its text tells."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _TEXTS):
            raise MemoryError(str(error)) from error
        raise
