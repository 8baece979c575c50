"""What this process may use of the machine: instruction sets, cores and their division among processes, and memory.

Linux numbers the hardware threads of all cores one after the other, so neighbors in number may share a core, or lie on
different sockets. A function that reads a folder takes it as an argument, so that a test can describe another machine.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import ceil
from pathlib import Path
from typing import Literal, TypeAlias

Isa: TypeAlias = Literal["avx512", "avx512_vnni", "avx2"]
"""avx512 has the instructions of BF16 and VNNI; avx512_vnni computes products of bf16 in float32, with the bits of avx2."""

_V3 = frozenset(("avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"))
_V4 = frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))
REQUIRED_FLAGS: dict[Isa, frozenset[str]] = {
    "avx512": _V3 | _V4 | {"avx512_vnni", "avx512_bf16"},
    "avx512_vnni": _V3 | _V4 | {"avx512_vnni"},
    "avx2": _V3,
}
"""CPU flags that compiled kernels need, best instruction set first; named as in /proc/cpuinfo. VMs may hide some."""

NO_ISA = "the CPU has neither AVX2 nor AVX-512 with VNNI"
NO_ISA_REMEDY = "use a machine whose CPU has AVX2, or a GPU; a virtual machine may hide the CPU's instruction sets"


CPUINFO = Path("/proc/cpuinfo")
_INTEL = "GenuineIntel"


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return the flags that the CPU reports; empty if they cannot be read."""
    return frozenset(_of_cpu("flags", cpuinfo).split())


def cpu_vendor(cpuinfo: Path = CPUINFO) -> str:
    """Return the vendor that the CPU reports; empty if it cannot be read."""
    return _of_cpu("vendor_id", cpuinfo)


def _of_cpu(name: str, cpuinfo: Path) -> str:
    """Return what the first processor says under a name."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def best_isa(flags: Iterable[str], vendor: str = "") -> Isa | None:
    """Return the fastest instruction set that has kernels and that `flags` cover; None if there is none.

    On Intel's CPUs two float32 operations are faster than their product of BF16: 97 against 66 billion operations a
    second and core on Sapphire Rapids. On AMD's, the product is fast.
    """
    known = [isa for isa, required in REQUIRED_FLAGS.items() if required <= frozenset(flags)]
    if vendor == _INTEL and "avx512_vnni" in known:
        return "avx512_vnni"
    return known[0] if known else None


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many cores this process may use: its affinity, or less if a cgroup's CPU quota is lower.

    A quota of 1.5 CPUs counts as two cores: two threads run 75% of the time, which beats one thread that always runs.
    """
    cores = len(os.sched_getaffinity(0))
    quotas = [quota for group in _own_groups("cpu", cgroups, own) if (quota := _cpu_quota(group)) is not None]
    return max(1, min(cores, *map(ceil, quotas))) if quotas else cores


def cores_to_stay_on(num_threads: int) -> list[int]:
    """Return a core for each thread if the threads use all cores; else none, as others may pin to the same cores."""
    cores = sorted(os.sched_getaffinity(0))
    return cores if num_threads == len(cores) > 1 else []


def available_bytes(
    cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup"), meminfo: Path = Path("/proc/meminfo")
) -> int:
    """Return the memory that the system and the limits of this process's cgroups still allow; 0 if unknown.

    Pages of files that are cached count as available, as the system itself counts them.
    """
    left = [found for group in _own_groups("memory", cgroups, own) if (found := _memory_left(group)) is not None]
    return min([_number(meminfo, "MemAvailable:") << 10, *left])


def _own_groups(controller: str, cgroups: Path, own: Path) -> Iterator[Path]:
    """Yield the cgroups, v2 or v1, that limit this process by a controller: the mounted root, its own and all between.

    In a container, the mounted root is the container's own cgroup, whatever path Linux reports.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    yield from (cgroups, cgroups / controller)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
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


def _memory_left(group: Path) -> int | None:
    """Return the bytes that a cgroup still allows; None without a limit."""
    for limit, used, cached in (
        ("memory.max", "memory.current", ""),
        # With the groups below it, as in its usage.
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        if most := _number(group / limit):
            files = sum(_number(group / "memory.stat", f"{cached}{kind}_file ") for kind in ("active", "inactive"))
            return max(0, most - _number(group / used) + files)
    return None


def _number(path: Path, name: str = "") -> int:
    """Return the number after a name in a file, or the file's only number; 0 if there is none."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = next((line.removeprefix(name).split()[:1] for line in lines if line.startswith(name)), [])
    return int(found[0]) if found and found[0].isdecimal() else 0


SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: the CPUs (hardware threads) of it that this process may use."""

    numa_node: int
    """The memory that is near to it. A socket has one NUMA node, or a few."""
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CpuShare:
    """What one of several processes on this machine gets of the CPUs."""

    cpus: tuple[int, ...]
    """The CPUs that it stays on."""
    num_threads: int
    """Threads that compute: fewer than `cpus` where a quota or reserved cores allow fewer."""


def cores_of(cpus: Iterable[int], system: Path = SYSTEM) -> tuple[Core, ...]:
    """Return the cores of these CPUs, those of the first NUMA node first.

    Where Linux does not say which CPUs share a core or a node, each is a core, on node 0.
    """
    wanted = set(cpus)
    node_of = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in (system / "node").glob("node[0-9]*")
        for cpu in _cpu_list(folder / "cpulist")
    }
    cores: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for cpu in sorted(wanted):
        siblings = tuple(_cpu_list(system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list")) or (cpu,)
        cores.setdefault((node_of.get(cpu, 0), siblings), []).append(cpu)
    return tuple(Core(node, tuple(found)) for (node, _), found in sorted(cores.items()))


def numa_nodes(cores: Iterable[Core]) -> dict[int, tuple[int, ...]]:
    """Return the CPUs of each NUMA node that has some of these cores."""
    nodes: dict[int, list[int]] = {}
    for core in cores:
        nodes.setdefault(core.numa_node, []).extend(core.cpus)
    return {node: tuple(sorted(cpus)) for node, cpus in sorted(nodes.items())}


_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_DEFAULT = 0


def refuses_mbind() -> bool:
    """Return whether the system refuses to set the policy of memory, as a container does without CAP_SYS_NICE.

    `penstock` never asks for that: it places memory by writing it first (`gpu_node/model/native/placement.py`).
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        page = ctypes.c_char.from_buffer(memory)
        call = ctypes.CDLL(None, use_errno=True).syscall
        address, size = ctypes.c_void_p(ctypes.addressof(page)), ctypes.c_ulong(mmap.PAGESIZE)
        answer = call(number, address, size, _MPOL_DEFAULT, None, ctypes.c_ulong(0), 0)
        del page
        return answer != 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS)


def cpu_shares(num_shares: int, *, reserved: int = 0, system: Path = SYSTEM) -> tuple[CpuShare, ...]:
    """Divide the CPUs that this process may use into shares, before any process with one starts.

    Consecutive shares get consecutive cores, so that a share lies on few sockets and no two shares have a core in
    common. If there are fewer cores than shares, cores are divided too. `reserved`: CPUs that shall stay idle.

    Raises ValueError if there are fewer usable CPUs than shares.
    """
    allowed = sorted(os.sched_getaffinity(0))
    usable = usable_cores() - reserved
    if usable < num_shares:
        raise ValueError(f"{num_shares} processes need a core each, but only {max(0, usable)} may be used")
    cores = [core.cpus for core in cores_of(allowed, system)]
    units: Sequence[tuple[int, ...]] = cores if len(cores) >= num_shares else [(cpu,) for core in cores for cpu in core]
    cpus = [tuple(sorted(chain.from_iterable(units[start:end]))) for start, end in _spans(len(units), num_shares)]
    threads = [0] * num_shares
    for _ in range(usable):
        at = min((at for at in range(num_shares) if threads[at] < len(cpus[at])), key=threads.__getitem__)
        threads[at] += 1
    return tuple(CpuShare(of_share, count) for of_share, count in zip(cpus, threads, strict=True))


def _spans(count: int, parts: int) -> list[tuple[int, int]]:
    size, rest = divmod(count, parts)
    return list(pairwise(accumulate((size + (part < rest) for part in range(parts)), initial=0)))


def _cpu_list(path: Path) -> list[int]:
    """Return the numbers in a file such as 0-3,8; none if it cannot be read."""
    try:
        words = [word for word in path.read_text().strip().split(",") if word]
        ranges = [(int(first), int(last or first)) for first, _, last in (word.partition("-") for word in words)]
    except (OSError, ValueError):
        return []
    return [number for first, last in ranges for number in range(first, last + 1)]
