"""A check that the C structs declared in Python have the sizes that the compiled library uses."""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping
from typing import Any


class KernelError(Exception):
    """A native call failed; the text gives the reason."""


class AbiError(KernelError):
    """The library was compiled from different sources."""


def check_sizes(library: Any, structs: Mapping[str, type[c.Structure]]) -> None:
    """Compare each struct's size with the library's `penstock_sizeof_<name>()`. Raises AbiError if they differ."""
    for name, struct in structs.items():
        size_of = getattr(library, f"penstock_sizeof_{name}")
        size_of.restype, size_of.argtypes = c.c_size_t, []
        if size_of() != c.sizeof(struct):
            raise AbiError(
                f"{struct.__name__} has {c.sizeof(struct)} bytes, but {size_of()} in the library: they differ in fields"
            )
