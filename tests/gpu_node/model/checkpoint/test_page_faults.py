"""Mapping the pages of a file before they are read."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from penstock.gpu_node.model.checkpoint import page_faults
from penstock.gpu_node.model.checkpoint.files import mapped
from penstock.gpu_node.model.checkpoint.page_faults import fault_in

NUM_PAGES = 64


@pytest.fixture
def content(tmp_path: Path) -> mmap.mmap:
    path = tmp_path / "file"
    path.write_bytes(bytes(NUM_PAGES * mmap.PAGESIZE))
    return mapped(path)


def resident_kib(content: mmap.mmap) -> int:
    """Return how much of a mapping this process has in its page table."""
    start = f"{np.frombuffer(content, np.uint8).ctypes.data:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(start))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1])


def test_all_pages_are_mapped(content: mmap.mmap) -> None:
    fault_in(np.frombuffer(content, np.uint8), lambda: False)
    assert resident_kib(content) == NUM_PAGES * mmap.PAGESIZE // 1024


def test_no_page_is_mapped_once_it_is_enough(content: mmap.mmap) -> None:
    fault_in(np.frombuffer(content, np.uint8), lambda: True)
    assert resident_kib(content) == 0


@pytest.mark.parametrize("meminfo", ["MemAvailable:       12 kB\n", "", None])
def test_a_file_larger_than_the_available_memory_is_left_alone(
    content: mmap.mmap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meminfo: str | None
) -> None:
    path = tmp_path / "meminfo"
    if meminfo is not None:
        path.write_text(meminfo)
    monkeypatch.setattr(page_faults, "_MEMINFO", path)
    fault_in(np.frombuffer(content, np.uint8), lambda: False)
    assert resident_kib(content) == 0


def test_a_kernel_that_refuses_is_no_error() -> None:
    inaccessible = np.empty(3 * mmap.PAGESIZE, np.uint8)[1:]  # does not start at a page
    fault_in(inaccessible, lambda: False)
