"""What this machine's CPU can do, and how much of it this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from math import ceil
from pathlib import Path
from typing import Literal, TypeAlias

Isa: TypeAlias = Literal["avx512", "avx2"]

_V3 = frozenset(("avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"))
_V4 = frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))
REQUIRED_FLAGS: dict[Isa, frozenset[str]] = {"avx512": _V3 | _V4 | {"avx512_vnni", "avx512_bf16"}, "avx2": _V3}
"""All that compilers may use, which a virtual machine may hide; best first, names as in /proc/cpuinfo."""


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets that the CPU names; empty where it does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def best_isa(flags: Iterable[str]) -> Isa | None:
    """The best instruction set that the kernels are written for and `flags` cover."""
    return next((isa for isa, required in REQUIRED_FLAGS.items() if required <= frozenset(flags)), None)


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity, or less where a container's quota says so."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_quota(cgroup)
    return cores if quota is None else max(1, min(cores, ceil(quota)))


def cores_to_stay_on(num_threads: int) -> list[int]:
    """A core for each thread where they are as many as there are; none where others might choose the same ones."""
    cores = sorted(os.sched_getaffinity(0))
    return cores if num_threads == len(cores) > 1 else []


def _cgroup_quota(cgroup: Path) -> float | None:
    """CPU time over wall time that the process's control group allows, by version 2 or 1 of the interface."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        allowed = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        return None if allowed < 0 else allowed / int((cgroup / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
