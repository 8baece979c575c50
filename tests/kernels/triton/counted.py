"""Counts the bytes that kernels load from a tensor, as Triton's interpreter runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


class LoadCounter:
    """Counts loads by address."""

    def __init__(self) -> None:
        self._loads: list[tuple[np.ndarray[Any, Any], int]] = []

    def note(self, pointers: Any, mask: Any) -> None:
        """Note a load of the pointers whose mask is set."""
        wanted = np.broadcast_to(mask.data.astype(bool), pointers.data.shape)
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        self._loads.append((pointers.data[wanted].astype(np.uint64).ravel(), size))

    def bytes_of(self, *tensors: torch.Tensor) -> int:
        """Return the bytes that were loaded from tensors, each load counted."""
        return sum(self._bytes_of(tensor) for tensor in tensors)

    def _bytes_of(self, tensor: torch.Tensor) -> int:
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        return sum(int(((at >= begin) & (at < end)).sum()) * size for at, size in self._loads)


@contextmanager
def counted_loads() -> Iterator[LoadCounter]:
    """Count the loads of all kernels that run meanwhile."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    counter, load = LoadCounter(), builder.create_masked_load

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        counter.note(ptrs, mask)
        return load(self, ptrs, mask, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", create_masked_load)
        yield counter
