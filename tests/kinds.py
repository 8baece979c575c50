"""What a test needs beside Python: markers that follow from its fixtures and from what its file imports.

`make quick` runs the tests that need none of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NOT_QUICK = ("slow", "model", "gpu", "process", "redis", "torch", "triton", "bench")
OF_FIXTURES = {
    "redis": {"redis_server", "redis_url", "redis_url_of_file", "redis"},
    "torch": {"tiny_model", "demo_folder", "demo_gguf"},
}
OF_IMPORTS = {
    "process": {"subprocess", "multiprocessing", "psutil", "fakes.processes", "fakes.terminal", "faults"},
    "redis": {"penstock.runtime.embedded_redis", "redis", "hostile"},
    "torch": {"torch", "transformers", "fakes.native", "fakes.single_kernels", "fixtures", "fakes.engine_runs"},
    "triton": {"triton", "fixtures.interpreter"},
}
"""A file that imports one of these, or a module below it."""
_IMPORT = re.compile(r"^ *(?:from ([\w.]+) import |import (\w[\w. ,]*))", re.MULTILINE)
OF_FOLDERS = {
    "bench": (TESTS / "ops/bench", TESTS / "ops/bench_gpu"),
    "torch": (TESTS / "kernels", TESTS / "gpu_node/model"),
    "triton": (TESTS / "kernels/triton", TESTS / "gpu_node/model/gpu"),
}


COMPUTING = tuple(TESTS / folder for folder in ("gpu_node", "kernels", "ops/bench", "ops/bench_gpu"))
"""Most tests elsewhere wait: for processes, for Redis, for a time to pass."""


def mark(item: pytest.Item) -> None:
    """Give a test its markers."""
    fixtures = set(getattr(item, "fixturenames", ()))
    for kind, names in OF_FIXTURES.items():
        if fixtures & names:
            item.add_marker(kind)
    for kind in kinds_of_file(item.path):
        item.add_marker(kind)


def is_quick(item: pytest.Item) -> bool:
    """Whether a test needs nothing but Python."""
    return not any(item.get_closest_marker(kind) for kind in NOT_QUICK)


def mixed(files: Sequence[Path]) -> list[Path]:
    """Put files whose tests compute evenly among those whose tests wait. Both kinds keep their order.

    Workers that take them in this order leave a processor idle less often.
    """
    kinds: dict[bool, list[Path]] = {True: [], False: []}
    for file in files:
        kinds[any(map(file.is_relative_to, COMPUTING)) and "process" not in kinds_of_file(file)].append(file)
    places = {file: number / len(some) for some in kinds.values() for number, file in enumerate(some)}
    return sorted(files, key=places.__getitem__)


@cache
def kinds_of_file(path: Path) -> frozenset[str]:
    """What all tests of a file are taken to need, by its imports."""
    imported = set(_imports_of(path))
    kinds = {kind for kind, names in OF_IMPORTS.items() if imported & names}
    return frozenset(kinds | {kind for kind, folders in OF_FOLDERS.items() if any(map(path.is_relative_to, folders))})


def _imports_of(path: Path) -> list[str]:
    """Every module that a file names, and the packages above it. Parsing all files would take a second."""
    modules = []
    for source, names in _IMPORT.findall(path.read_text()):
        modules += [source] if source else [name.split()[0] for name in names.split(",")]
    return [name.rsplit(".", cut)[0] for name in modules for cut in range(name.count(".") + 1)]
