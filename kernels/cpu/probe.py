"""Finds the CPU's instruction sets and the number of cores that this process may use."""

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
"""CPU flags that compiled kernels need, best instruction set first; named as in /proc/cpuinfo. VMs may hide some."""

NO_ISA = "the CPU has neither AVX2 nor AVX-512 with BF16 and VNNI"
NO_ISA_REMEDY = "use a machine whose CPU has AVX2, or a GPU; a virtual machine may hide the CPU's instruction sets"


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the flags that the CPU reports; empty if they cannot be read."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def best_isa(flags: Iterable[str]) -> Isa | None:
    """Return the best instruction set that has kernels and that `flags` cover; None if there is none."""
    return next((isa for isa, required in REQUIRED_FLAGS.items() if required <= frozenset(flags)), None)


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many cores this process may use: its affinity, or less if a cgroup's CPU quota is lower.

    A quota of 1.5 CPUs counts as two cores: two threads run 75% of the time, which beats one thread that always runs.
    """
    cores = len(os.sched_getaffinity(0))
    quotas = [quota for group in _cpu_groups(cgroups, own) if (quota := _cpu_quota(group)) is not None]
    return max(1, min(cores, *map(ceil, quotas))) if quotas else cores


def cores_to_stay_on(num_threads: int) -> list[int]:
    """Return a core for each thread if the threads use all cores; else none, as others may pin to the same cores."""
    cores = sorted(os.sched_getaffinity(0))
    return cores if num_threads == len(cores) > 1 else []


def _cpu_groups(cgroups: Path, own: Path) -> Iterator[Path]:
    """Yield the cgroups, v2 or v1, that limit this process's CPU time: the mounted root, its own and all between.

    In a container, the mounted root is the container's own cgroup, whatever path Linux reports.
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
    """Return the CPU time per wall time that a cgroup allows; None without a limit."""
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
