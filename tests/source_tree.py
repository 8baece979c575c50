"""The repository's own source files, as the tests of form read them."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLD_REDIS = ROOT / "build/old-redis/bin"
"""The folder of a Redis 6.2, the oldest that penstock supports, where `make test` puts it. It has known holes."""
ROOMS = {
    "penstock": ROOT / "src/penstock",
    "penstock.producer": ROOT / "producer",
    "penstock.cli": ROOT / "cli",
    "penstock.gateway": ROOT / "gateway",
    "penstock.gpu_node": ROOT / "gpu_node",
    "penstock.kernels": ROOT / "kernels",
}


@dataclass(frozen=True)
class Module:
    """One file of the package: its absolute name, path and syntax tree."""

    name: str
    path: Path
    tree: ast.Module

    def __str__(self) -> str:
        return self.name


@cache
def modules() -> dict[str, Module]:
    """Every module of the package, read where it really lies (the links inside `penstock/` are skipped)."""
    # Python 3.11 refuses a source while whose reading the garbage collector has run finalizers of other tests.
    gc.disable()
    try:
        return {module.name: module for module in _modules()}
    finally:
        # These are a million objects that stay. Each full collection of later tests would take a second.
        gc.freeze()
        gc.enable()


def _modules() -> Iterator[Module]:
    for package, folder in ROOMS.items():
        for path in sorted(folder.rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(ROOT)):
                continue
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            name = ".".join(parts).removesuffix(".__init__")
            yield Module(name, path, ast.parse(path.read_text(), str(path)))
