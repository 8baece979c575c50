"""What the compiler made of the kernels' programs, kept in `compiled_80.json` and `compiled_90.json`.

They are named by Triton's own hash. It covers the source, constants and options of a program, the GPU, Triton and
ptxas. A program with the hash of an earlier compilation has its facts, so a run compiles only what has changed: 3 s of
CPU time instead of 73. An old file costs only time; `compile_all.py 90 --record` writes a new one. `make check-full`
reads none: it compiles all programs, and compares.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

Facts = dict[str, Any]


@dataclass(frozen=True)
class KnownProgram:
    """Stands for a program that an earlier run has compiled."""

    hash: str
    facts: Facts


class KnownPrograms:
    """The programs of a generation of GPUs. With `reads`, it takes what the file has; else it compiles them all."""

    def __init__(self, capability: int, *, reads: bool, folder: Path = Path(__file__).parent) -> None:
        self.path = folder / f"compiled_{capability}.json"
        self.programs: dict[str, Facts] = {}
        """By hash: those of this run."""
        self._capability = capability
        stored = json.loads(self.path.read_text()) if reads and self.path.exists() else {}
        # Facts that were read otherwise are not known.
        self._stored: dict[str, Facts] = stored["programs"] if stored.get("reader") == _reader() else {}

    def compile(self, src: Any, target: Any, options: Mapping[str, Any]) -> Any:
        """Stand in for `triton.compile`: return the known program, or compile it."""
        name = _hash_of(src, target, options) if self._stored else ""
        if name in self._stored:
            return KnownProgram(name, self._stored[name])
        return triton.compile(src, target=target, options=options)

    def facts_of(self, program: Any) -> Facts:
        """Return what tests ask of a program, and keep it."""
        found = program.facts if isinstance(program, KnownProgram) else _read(program, self._capability)
        self.programs[program.hash] = found
        return {**found, "hash": program.hash}

    def record(self) -> None:
        """Write the file: the programs of this run."""
        lines = [f"  {json.dumps(name)}: {json.dumps(self.programs[name])}" for name in sorted(self.programs)]
        head = f'{{\n"reader": {json.dumps(_reader())},\n"programs": {{\n'
        self.path.write_text(head + ",\n".join(lines) + "\n}\n}\n")


def _read(kernel: Any, capability: int) -> Facts:
    ptx = kernel.asm["ptx"]
    return {
        "is_ptx": f".target sm_{capability}" in ptx,
        "is_dependent": kernel.metadata.launch_pdl,
        "waits_first": waits_first(ptx),
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "additions": ptx.count("add.f32"),
    }


def waits_first(ptx: str) -> bool | None:
    """Whether a program waits for the kernel ahead, and signals, before it touches global memory or branches.

    None: it never waits or signals.
    """
    if "griddepcontrol" not in ptx:
        return None
    wait, signal = ptx.find("griddepcontrol.wait"), ptx.find("griddepcontrol.launch_dependents")
    other = re.search(r"\b(?:ld|st|atom|red|cp)\.[\w.:]*global|\bbra\b|\bret\b", ptx)
    return other is not None and 0 <= wait < signal < other.start()


def _hash_of(src: Any, target: Any, options: Mapping[str, Any]) -> str:
    """Return the hash that the compiled program will have. Should Triton compute it otherwise, no program is known."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    backend = make_backend(target)
    parsed = backend.parse_options({**options, **src.parse_options()})
    key = get_cache_key(src, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()


def _reader() -> str:
    """Return the hash of the functions that read facts from a program."""
    source = "".join(map(inspect.getsource, (_read, waits_first)))
    return hashlib.sha256(source.encode()).hexdigest()
