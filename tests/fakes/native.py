"""The native kernels as tests build them: one library for each instruction set, kept between sessions.

These libraries also contain functions that call single kernels, which the product's library does not need.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.gpu_node.model.checkpoint.conversion_cache import cache_folder
from penstock.kernels.cpu.build import BuildError, library_path
from penstock.kernels.cpu.probe import REQUIRED_FLAGS, Isa, best_isa, cpu_flags

ISAS: tuple[Isa, ...] = ("avx512", "avx2")
"""Those with kernels of their own. avx512_vnni is avx512 with another product of bf16: test_instruction_sets.py."""
SINGLE_KERNELS = Path(__file__).with_name("single_kernels.cpp")
SPINS = 20
"""How often a thread looks before it sleeps. Tests run more threads than there are cores, so a spin delays others."""
SANITIZE = "PENSTOCK_TEST_SANITIZE"
"""Names the sanitizers that the kernels are built with; the process must have preloaded their libraries."""


def sanitizer_flags() -> tuple[str, ...]:
    """Return the flags for the sanitizers that the environment names. A finding ends the process."""
    wanted = os.environ.get(SANITIZE)
    return (f"-fsanitize={wanted}", "-fno-sanitize-recover=all", "-O1", "-g") if wanted else ()


def built(isa: Isa) -> Path:
    """Return the library for an instruction set. Skip the test if it cannot be built or run here."""
    missing = REQUIRED_FLAGS[isa] - cpu_flags()
    if missing:
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    try:
        return _library(isa, sanitizer_flags())
    except BuildError as error:
        pytest.skip(f"no kernels here: {error}")


@cache
def _library(isa: Isa, flags: tuple[str, ...]) -> Path:
    extras: Any = {"extra_flags": (f"-DPENSTOCK_SPINS={SPINS}", *flags), "extra_sources": (SINGLE_KERNELS,)}
    return library_path(isa, cache_folder() / "native", lambda fraction: None, **extras)


def main() -> None:
    """`python -m fakes.native`: build what tests load, so that no test's time limit includes the build.

    A build while other tests run can exceed a test's time limit. Without a compiler, nothing is built.
    """
    flags = cpu_flags()
    with suppress(BuildError):
        for isa in REQUIRED_FLAGS:
            if flags >= REQUIRED_FLAGS[isa]:
                _library(isa, sanitizer_flags())
        if (best := best_isa(flags)) is not None:
            library_path(best, cache_folder() / "native", lambda fraction: None)


if __name__ == "__main__":
    main()
