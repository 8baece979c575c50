"""Translate torch's out-of-memory errors to MemoryError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TEXTS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "[CUDA]: out of memory")
"""Messages of torch for host memory; for pinned memory and graphs; for libraries; of Triton for kernels."""


@contextmanager
def translate_out_of_memory() -> Iterator[None]:
    """Raise MemoryError in place of torch's out-of-memory errors.

    torch has an error class for GPU memory; for host memory, only the text of a RuntimeError tells.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _TEXTS):
            raise MemoryError(str(error)) from error
        raise
