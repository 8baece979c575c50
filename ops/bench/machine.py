"""Where a run happened, and how much of the CPU other processes took meanwhile."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

import psutil

PACKAGES = ("penstock-llm", "torch", "transformers", "redis", "numpy", "tokenizers")
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")


def describe() -> dict[str, object]:
    """Machine, versions, date."""
    model = next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    flags = next((line.split() for line in _cpuinfo() if line.startswith("flags")), [])
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": model,
        "cpu_features": [flag for flag in CPU_FEATURES if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def revision() -> str:
    """The commit of these sources, marked when they were changed since; `unknown` outside a clone and without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


class ForeignCpu:
    """Share of all cores that others took from processes of this one's tree, from its making to `share`.

    Others are processes of this machine and, on a virtual one, its host's other guests (steal).
    """

    def __init__(self) -> None:
        self._busy_s, self._own_s, self._start_s = _busy_s(), _tree_s(), time.monotonic()

    def share(self) -> float:
        """Until now."""
        elapsed_s = time.monotonic() - self._start_s
        foreign_s = (_busy_s() - self._busy_s) - (_tree_s() - self._own_s)
        return max(0.0, foreign_s / (elapsed_s * (psutil.cpu_count() or 1)))


def _tree_s() -> float:
    own = psutil.Process()
    times = [own.cpu_times()]
    for child in own.children(recursive=True):
        try:
            times.append(child.cpu_times())
        except psutil.NoSuchProcess:
            continue
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)
