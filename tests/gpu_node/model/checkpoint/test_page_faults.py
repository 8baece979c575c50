"""Mapping the pages of a file before they are read."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from fakes.waiting import wait_until

from penstock.gpu_node.model.checkpoint import mapped_file
from penstock.gpu_node.model.checkpoint.mapped_file import MappedFile

NUM_PAGES = 1024
ALMOST_ALL_KIB = NUM_PAGES * mmap.PAGESIZE // 1024 * 9 // 10
"""Linux passes over a neighbor that it just moves or marks for read-ahead: such a page is mapped when it is used."""


@pytest.fixture
def file(tmp_path: Path) -> MappedFile:
    path = tmp_path / "file"
    with path.open("wb") as written:
        written.write(bytes(NUM_PAGES * mmap.PAGESIZE))
        os.fsync(written.fileno())  # Linux maps no neighbor that is just being written to the disk.
    return MappedFile(path)


def resident_kib(file: MappedFile) -> int:
    """Return how much of a mapping this process has in its page table."""
    start = f"{file.content.ctypes.data:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(start))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1])


def test_almost_all_pages_are_mapped(file: MappedFile) -> None:
    file.page_faults.take(lambda: False)
    assert resident_kib(file) >= ALMOST_ALL_KIB


def test_no_page_is_mapped_once_it_is_enough(file: MappedFile) -> None:
    file.page_faults.take(lambda: True)
    assert resident_kib(file) == 0


def test_a_file_larger_than_the_available_memory_is_left_alone(
    file: MappedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_file, "available_bytes", lambda: 12 << 10)
    file.page_faults.take(lambda: False)
    assert resident_kib(file) == 0


def test_a_thread_maps_almost_all_pages_ahead(file: MappedFile) -> None:
    file.page_faults.take_ahead()
    wait_until(lambda: resident_kib(file) >= ALMOST_ALL_KIB)
    file.release()
    assert resident_kib(file) == 0


def test_each_page_is_mapped_once(file: MappedFile) -> None:
    file.page_faults.take(lambda: False)
    file.release()
    file.page_faults.take(lambda: False)
    assert resident_kib(file) == 0
