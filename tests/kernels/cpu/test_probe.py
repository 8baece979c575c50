"""What the machine can do, and how much of it this process may use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.kernels.cpu import build
from penstock.kernels.cpu.probe import REQUIRED_FLAGS, Isa, best_isa, cpu_flags, cpu_vendor, usable_cores

CPUINFO = """processor\t: 0
model name\t: made up
flags\t\t: fpu sse avx2 fma f16c
bugs\t\t: none

processor\t: 1
flags\t\t: fpu other
"""


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def test_flags_are_the_first_processors(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO)
    assert cpu_flags(path) == {"fpu", "sse", "avx2", "fma", "f16c"}
    path.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert cpu_flags(path) == frozenset()
    assert cpu_flags(tmp_path / "none") == frozenset()


def test_the_best_instruction_set_is_taken_and_each_needs_all_its_flags() -> None:
    assert best_isa(REQUIRED_FLAGS["avx512"]) == "avx512"
    assert best_isa(REQUIRED_FLAGS["avx2"]) == "avx2"
    assert best_isa(REQUIRED_FLAGS["avx512"] - {"avx512_bf16"}) == "avx512_vnni"
    assert best_isa(REQUIRED_FLAGS["avx512"] - {"avx512_vnni"}) == "avx2"
    assert best_isa(REQUIRED_FLAGS["avx512"] - {"f16c"}) is None
    assert best_isa([]) is None


def test_intels_product_of_bf16_is_left_out_because_it_is_slow(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"vendor_id\t: GenuineIntel\nflags\t\t: {' '.join(REQUIRED_FLAGS['avx512'])}\n")
    assert best_isa(cpu_flags(path), cpu_vendor(path)) == "avx512_vnni"
    path.write_text(path.read_text().replace("GenuineIntel", "AuthenticAMD"))
    assert best_isa(cpu_flags(path), cpu_vendor(path)) == "avx512"
    assert best_isa(REQUIRED_FLAGS["avx2"], "GenuineIntel") == "avx2"


_MACROS = {"__BMI__": "bmi1", "__LZCNT__": "abm", "__AVX512VNNI__": "avx512_vnni", "__AVX512BF16__": "avx512_bf16"}


@pytest.mark.parametrize("isa", REQUIRED_FLAGS)
def test_compiled_code_needs_only_the_required_cpu_flags(isa: Isa) -> None:
    compiler = shutil.which("g++") or pytest.skip("no g++")

    def macros(*flags: str) -> set[str]:
        command = [compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]
        return set(re.findall("__[A-Z]+[A-Z0-9_]*__", subprocess.run(command, capture_output=True, text=True).stdout))

    # What every CPU with AVX has, and what is no instruction.
    usual = macros("-mavx", "-mpopcnt", "-mcx16", "-msahf")
    used = macros(*build._ISA_FLAGS[isa]) - usual - {"__EVEX256__", "__EVEX512__"}
    assert {_MACROS.get(name, name.strip("_").lower()) for name in used} <= REQUIRED_FLAGS[isa]


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("1600000 100000", 8),
        ("nonsense", 8),
        ("", 8),
    ],
)
def test_cores_are_limited_by_a_control_group_of_version_2(tmp_path: Path, limit: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(("quota", "period", "cores"), [(-1, 100_000, 8), (250_000, 100_000, 3), (5_000, 100_000, 1)])
def test_cores_are_limited_by_a_control_group_of_version_1(tmp_path: Path, quota: int, period: int, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text(f"{period}\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("own", "limits", "cores"),
    [
        ("0::/user.slice/node.service\n", {"user.slice/node.service/cpu.max": "200000 100000"}, 2),
        ("0::/user.slice/node.service\n", {"user.slice/cpu.max": "300000 100000"}, 3),
        ("0::/a/b\n", {"a/cpu.max": "500000 100000", "a/b/cpu.max": "400000 100000"}, 4),
        ("0::/outside/of/the/container\n", {"cpu.max": "100000 100000"}, 1),
        ("0::/../sibling\n", {"cpu.max": "max 100000"}, 8),
        ("4:memory:/m\n3:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "200000"}, 2),
        ("4:memory:/m\n3:cpu,cpuacct:/a\n", {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "m/cpu.max": "100000 100000"}, 8),
    ],
)
def test_the_narrowest_control_group_around_the_process_counts(
    tmp_path: Path, own: str, limits: dict[str, str], cores: int
) -> None:
    for name, limit in limits.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(limit)
        (path.parent / "cpu.cfs_period_us").write_text("100000")
    (tmp_path / "own").write_text(own)
    assert usable_cores(tmp_path / "cgroup", tmp_path / "own") == cores


@pytest.mark.usefixtures("eight_cores")
def test_without_a_limit_the_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores(tmp_path) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert usable_cores(tmp_path) == 1
