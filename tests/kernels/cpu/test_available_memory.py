"""How much memory a process may still take: the system's, and what its control groups leave it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.kernels.cpu import probe

MIB = 1 << 20
PATH = "system.slice/penstock.service"


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """Where the system shows processes and control groups; 1000 MiB are available."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 4096000 kB\nMemAvailable: {1000 << 10} kB\n")
    return proc, groups


@pytest.fixture
def available_bytes(roots: tuple[Path, Path]) -> Callable[[], int]:
    proc, groups = roots
    return lambda: probe.available_bytes(groups, proc / "self" / "cgroup", proc / "meminfo")


def write(folder: Path, **contents: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def test_without_groups_all_that_the_system_has_is_available(
    roots: tuple[Path, Path], available_bytes: Callable[[], int]
) -> None:
    assert available_bytes() == 1000 * MIB


@pytest.mark.parametrize("meminfo", ["", "MemTotal: 4096000 kB\n"])
def test_a_system_that_does_not_say_has_nothing_available(
    roots: tuple[Path, Path], available_bytes: Callable[[], int], meminfo: str
) -> None:
    (roots[0] / "meminfo").write_text(meminfo)
    assert available_bytes() == 0


def test_a_limit_of_the_own_group_counts_and_its_cached_files_are_available(
    roots: tuple[Path, Path], available_bytes: Callable[[], int]
) -> None:
    proc, groups = roots
    (proc / "self" / "cgroup").write_text(f"0::/{PATH}\n")
    stat = f"anon 5\nactive_file {30 * MIB}\ninactive_file {20 * MIB}\nshmem 7"
    write(groups / PATH, max=500 * MIB, current=150 * MIB, stat=stat)
    assert available_bytes() == 400 * MIB


def test_a_limit_of_a_group_above_counts(roots: tuple[Path, Path], available_bytes: Callable[[], int]) -> None:
    proc, groups = roots
    (proc / "self" / "cgroup").write_text(f"0::/{PATH}\n")
    write(groups / PATH, max="max", current=150 * MIB)
    write(groups / "system.slice", max=300 * MIB, current=290 * MIB)
    assert available_bytes() == 10 * MIB


def test_the_own_group_of_a_container_is_its_root(roots: tuple[Path, Path], available_bytes: Callable[[], int]) -> None:
    proc, groups = roots
    (proc / "self" / "cgroup").write_text("0::/docker/0123\n")
    write(groups, max=200 * MIB, current=250 * MIB)
    assert available_bytes() == 0


def test_version_1_of_groups_is_known(roots: tuple[Path, Path], available_bytes: Callable[[], int]) -> None:
    proc, groups = roots
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n")
    stat = f"active_file 0\ntotal_active_file {3 * MIB}\ntotal_inactive_file {4 * MIB}"
    write(groups / "memory" / "a" / "b", limit_in_bytes=100 * MIB, usage_in_bytes=60 * MIB, stat=stat)
    write(groups / "memory", limit_in_bytes=(1 << 63) - 4096, usage_in_bytes=9)
    assert available_bytes() == 47 * MIB
