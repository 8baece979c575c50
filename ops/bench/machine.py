"""Where a run happened, and how much of the CPU other processes took meanwhile."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path

import psutil

PACKAGES = ("penstock", "torch", "transformers", "redis", "numpy", "tokenizers")


def describe() -> dict[str, object]:
    """Machine, versions, date."""
    model = next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    flags = next((line.split() for line in _cpuinfo() if line.startswith("flags")), [])
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": model,
        "cpu_features": [flag for flag in wanted if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


class ForeignCpu:
    """Share of all cores that processes outside this one's tree used since the start of the block."""

    def __enter__(self) -> ForeignCpu:
        self._busy_s, self._own_s, self._start_s = _busy_s(), self._tree_s(), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        elapsed_s = time.monotonic() - self._start_s
        foreign_s = (_busy_s() - self._busy_s) - (self._tree_s() - self._own_s)
        self.share = max(0.0, foreign_s / (elapsed_s * (psutil.cpu_count() or 1)))

    @staticmethod
    def _tree_s() -> float:
        own = psutil.Process()
        times = [own.cpu_times()]
        for child in own.children(recursive=True):
            try:
                times.append(child.cpu_times())
            except psutil.NoSuchProcess:
                continue
        ended = own.cpu_times()
        return sum(t.user + t.system for t in times) + ended.children_user + ended.children_system


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)
