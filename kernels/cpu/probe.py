"""What this machine's CPU can do, and how much of it this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
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


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may use: its affinity, or less where a control group's CPU quota says so.

    A quota of 1.5 CPUs counts as two cores: two threads run three quarters of the time, one thread half as fast always.
    """
    cores = len(os.sched_getaffinity(0))
    quotas = [quota for group in _cpu_groups(cgroups, own) if (quota := _cpu_quota(group)) is not None]
    return max(1, min(cores, *map(ceil, quotas))) if quotas else cores


def cores_to_stay_on(num_threads: int) -> list[int]:
    """A core for each thread where they are as many as there are; none where others might choose the same ones."""
    cores = sorted(os.sched_getaffinity(0))
    return cores if num_threads == len(cores) > 1 else []


def _cpu_groups(cgroups: Path, own: Path) -> Iterator[Path]:
    """Control groups that limit this process's CPU time, by version 2 or 1 of the interface, from its own to the root.

    Inside a container its own group is the root of what is mounted, whatever path the kernel names.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    yield from (cgroups, cgroups / "cpu")
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            mounted = cgroups / controllers if controllers else cgroups
            group = mounted / path.lstrip("/")
            yield from (one for one in (group, *group.parents) if one != mounted and one.is_relative_to(mounted))
            yield mounted


def _cpu_quota(group: Path) -> float | None:
    """CPU time over wall time that a control group allows; None where it has no limit."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        allowed = int((group / "cpu.cfs_quota_us").read_text())
        return None if allowed < 0 else allowed / int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
