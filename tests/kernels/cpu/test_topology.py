"""CPUs are divided by core and socket, on machines that a folder describes."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from penstock.kernels.cpu import probe
from penstock.kernels.cpu.probe import Core, CpuShare, cores_of, cpu_shares, numa_nodes


def machine(folder: Path, nodes: list[str], siblings: dict[int, str]) -> Path:
    """Write the files of a machine: the CPUs of each NUMA node, and of each CPU those that share its core."""
    for number, cpus in enumerate(nodes):
        (folder / "node" / f"node{number}").mkdir(parents=True)
        (folder / "node" / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    for cpu, cpus in siblings.items():
        of_cpu = folder / "cpu" / f"cpu{cpu}" / "topology"
        of_cpu.mkdir(parents=True)
        (of_cpu / "thread_siblings_list").write_text(f"{cpus}\n")
    return folder


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two sockets of two cores with two threads each, numbered as Linux does: first threads first."""
    return machine(tmp_path, ["0-1,4-5", "2-3,6-7"], {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(probe, "usable_cores", lambda: 8)


def test_cores_have_their_hardware_threads_and_their_socket(two_sockets: Path) -> None:
    assert cores_of(range(8), two_sockets) == (Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3, 7)))
    assert cores_of([5, 6], two_sockets) == (Core(0, (5,)), Core(1, (6,)))
    assert numa_nodes(cores_of([0, 5, 6], two_sockets)) == {0: (0, 5), 1: (6,)}


def test_without_a_description_each_cpu_is_a_core_of_one_socket(tmp_path: Path) -> None:
    assert cores_of([3, 1], tmp_path) == (Core(0, (1,)), Core(0, (3,)))
    (tmp_path / "node" / "node0").mkdir(parents=True)
    (tmp_path / "node" / "node0" / "cpulist").write_text("no number\n")
    assert cores_of([3], tmp_path) == (Core(0, (3,)),)


@pytest.mark.usefixtures("usable")
def test_two_shares_are_the_two_sockets(two_sockets: Path) -> None:
    assert cpu_shares(2, system=two_sockets) == (CpuShare((0, 1, 4, 5), 4), CpuShare((2, 3, 6, 7), 4))


@pytest.mark.usefixtures("usable")
def test_shares_have_no_core_in_common_unless_there_are_too_few(two_sockets: Path) -> None:
    uneven = cpu_shares(3, system=two_sockets)
    assert uneven == (CpuShare((0, 1, 4, 5), 4), CpuShare((2, 6), 2), CpuShare((3, 7), 2))
    assert [share.cpus for share in cpu_shares(4, system=two_sockets)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    of_eight = cpu_shares(8, system=two_sockets)
    assert [(share.cpus, share.num_threads) for share in of_eight[:3]] == [((0,), 1), ((4,), 1), ((1,), 1)]


@pytest.mark.usefixtures("usable")
def test_a_quota_and_reserved_cores_leave_fewer_threads(two_sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "usable_cores", lambda: 3)
    assert [(len(share.cpus), share.num_threads) for share in cpu_shares(2, system=two_sockets)] == [(4, 2), (4, 1)]
    assert [share.num_threads for share in cpu_shares(2, reserved=1, system=two_sockets)] == [1, 1]
    with pytest.raises(ValueError, match="2 processes need a core each, but only 1 may be used"):
        cpu_shares(2, reserved=2, system=two_sockets)


def test_this_machine_is_divided_completely() -> None:
    allowed = os.sched_getaffinity(0)
    assert sorted(cpu for core in cores_of(allowed) for cpu in core.cpus) == sorted(allowed)
    (whole,) = cpu_shares(1)
    assert set(whole.cpus) == allowed


def test_a_refused_policy_of_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.refuses_mbind() in (False, True)
    # No system call has this number, as in a container that hides it.
    monkeypatch.setattr(probe, "_MBIND", {platform.machine(): 99_999})
    assert probe.refuses_mbind()
    monkeypatch.setattr(probe, "_MBIND", {})
    assert not probe.refuses_mbind()
