"""Small runs under the tools of the CUDA toolkit, where they are installed: compute-sanitizer and Nsight Compute."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_gpu.small_run import PROFILED
from bench_gpu.verdict import WrongResultError

Row = dict[str, Any]
_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/nsight-compute")
_TIMEOUT_S = 100
_FOUND_ERRORS = 86
"""The exit code that the sanitizer is told to use."""
_NCU_SECTIONS = ("SpeedOfLight", "Occupancy", "MemoryWorkloadAnalysis", "WarpStateStats")


def sanitized(*, dry: bool, tool: str | None = None) -> Iterator[Row]:
    """Yield what compute-sanitizer says of each kernel and of replayed graphs. Raises WrongResultError for an error.

    tool: its path; None: where it is installed. Dry runs compute the same without it.
    """
    tool = tool or find_tool("compute-sanitizer")
    for part in ("kernels", "steps"):
        yield from _under(
            "compute-sanitizer",
            [tool, "--tool", "memcheck", "--error-exitcode", str(_FOUND_ERRORS)] if tool else None,
            part,
            # torch's allocator would hide an access behind a tensor's end. Graphs cannot be captured without it.
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if part == "kernels" else {},
            dry=dry,
        )


def profiled(out: Path, *, dry: bool, tool: str | None = None) -> Iterator[Row]:
    """Yield how Nsight Compute ended; its table of the kernels of PROFILED goes to `out`/ncu.csv.

    tool: as for `sanitized`.
    """
    tool = tool or find_tool("ncu")
    sections = [word for name in _NCU_SECTIONS for word in ("--section", name)]
    kernels = ["--kernel-name", f"regex:^({'|'.join(PROFILED)})$"]
    log = ["--csv", "--log-file", str(out / "ncu.csv")]
    yield from _under("ncu", [tool, *sections, *kernels, *log] if tool else None, "profiled", {}, dry=dry)


def find_tool(name: str) -> str | None:
    """Return the path of a tool of the CUDA toolkit, or None."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(_FOLDERS))


def _under(tool: str, command: list[str] | None, part: str, env: dict[str, str], *, dry: bool) -> Iterator[Row]:
    """Run a part of `small_run` under a tool, or without it in a dry run."""
    row: Row = {"tool": tool, "part": part}
    if command is None and not dry:
        yield row | {"skipped": f"{tool} is not installed"}
        return
    words = [*(command or ()), sys.executable, "-m", "bench_gpu.small_run", part, *(["--dry"] if dry else ())]
    try:
        done = subprocess.run(
            words, env=os.environ | env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield row | {"skipped": f"no end after {_TIMEOUT_S} s"}
        return
    output = done.stdout + done.stderr
    if done.returncode == _FOUND_ERRORS or "WrongResultError" in output:
        raise WrongResultError(f"{tool} on {part}: {_errors_in(output)}")
    if "ERR_NVGPUCTRPERM" in output:
        yield row | {"skipped": "the driver lets only administrators read performance counters (ERR_NVGPUCTRPERM)"}
        return
    if done.returncode:
        raise RuntimeError(f"{tool} on {part} ended with {done.returncode}: {output[-2000:]}")
    if command is None:
        row["skipped"] = f"{tool} is not installed; the part ran without it"
    yield row | {"launches": len(done.stdout.splitlines())}


def _errors_in(output: str) -> str:
    """Return the lines of the sanitizer's report, or the last lines of a program that raised."""
    lines = [line for line in output.splitlines() if re.match(r"=========\s+\S", line)]
    return "\n".join(lines[:20] or output.splitlines()[-5:])
