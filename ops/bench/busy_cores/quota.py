"""A control group whose processes together get the time of one CPU, by version 2 or 1 of the interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PERIOD_US = 100_000
ROOT = Path("/sys/fs/cgroup")


@contextmanager
def one_cpu_group() -> Iterator[Callable[[], object] | None]:
    """Yield a call that moves the calling process into the group; None where no group can be made."""
    base = ROOT / "cpu" if (ROOT / "cpu").is_dir() else ROOT
    group = base / f"penstock-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        if base == ROOT:
            (group / "cpu.max").write_text(f"{PERIOD_US} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(PERIOD_US))
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        yield None
    finally:
        with suppress(OSError):
            group.rmdir()
