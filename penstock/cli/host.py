"""What this machine is: processor features, cores that this process may use, graphics cards."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_NVIDIA_SMI_TIMEOUT_S = 20


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Feature flags in the text of /proc/cpuinfo; empty where it names none."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def usable_cores(cgroup_root: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that affinity and the cgroup's quota leave to this process."""
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    quota = _cgroup_quota(cgroup_root)
    return cores if quota is None else min(cores, quota)


def _cgroup_quota(root: Path) -> float | None:
    try:
        limit, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return _cgroup_v1_quota(root / "cpu")
    return None if limit == "max" else int(limit) / int(period)


def _cgroup_v1_quota(folder: Path) -> float | None:
    try:
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return limit / period if limit > 0 else None


def gpus() -> list[str]:
    """Names of the NVIDIA cards that the driver sees."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
