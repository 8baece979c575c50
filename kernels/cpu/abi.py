"""Whether the structs that Python writes down by hand are as large as those that the library was compiled with."""

from __future__ import annotations

import ctypes as c
from collections.abc import Mapping
from typing import Any


class KernelError(Exception):
    """A native call failed; says why."""


class AbiError(KernelError):
    """The library was compiled from other sources than these."""


def check_sizes(library: Any, structs: Mapping[str, type[c.Structure]]) -> None:
    """Compare each struct with what `penstock_sizeof_<name>` of the library says. Raises AbiError."""
    for name, struct in structs.items():
        size_of = getattr(library, f"penstock_sizeof_{name}")
        size_of.restype, size_of.argtypes = c.c_size_t, []
        if size_of() != c.sizeof(struct):
            raise AbiError(
                f"{struct.__name__} has {c.sizeof(struct)} bytes, but {size_of()} in the library: they differ in fields"
            )
