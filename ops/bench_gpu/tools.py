"""Small runs under the tools of the CUDA toolkit, where they are installed: compute-sanitizer and Nsight Compute."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_gpu.measure import Clock
from bench_gpu.programs import Ended, run_program
from bench_gpu.small_run import PROFILED
from bench_gpu.verdict import WrongResultError

Row = dict[str, Any]
_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/nsight-compute")
_LIMIT_S = 100.0
"""Of a program under a tool. The stage may leave less."""
_FOUND_ERRORS = 86
"""The exit code that the sanitizer is told to use."""
_NCU_SECTIONS = ("SpeedOfLight", "Occupancy", "MemoryWorkloadAnalysis", "WarpStateStats")


def sanitized(clock: Clock, *, dry: bool, tool: str | None = None, python: str = sys.executable) -> Iterator[Row]:
    """Yield compute-sanitizer's result for each kernel and for replayed graphs. Raises WrongResultError for an error.

    tool, python: their paths; None: where the tool is installed. Dry runs compute the same without it.
    """
    tool = tool or find_tool("compute-sanitizer")
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(_FOUND_ERRORS)] if tool else None
    for part in ("kernels", "steps"):
        program = [python, "-m", "bench_gpu.small_run", part]
        if command and not dry:
            # It compiles for minutes on a new machine, which the tool's time limit should not include.
            ended = run_program(program, clock.left_s)
            _check({"tool": "none", "part": part}, ended)
        # torch's allocator would hide an access behind a tensor's end. Graphs cannot be captured without it.
        # The tool does not permit segments that grow.
        env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if part == "kernels" else {"PYTORCH_ALLOC_CONF": ""}
        yield _under("compute-sanitizer", command, program, env, clock, dry=dry)


def profiled(
    out: Path, clock: Clock, *, dry: bool, tool: str | None = None, python: str = sys.executable
) -> Iterator[Row]:
    """Yield how Nsight Compute ended; its table of the kernels of PROFILED goes to `out`/ncu.csv.

    tool, python: as for `sanitized`.
    """
    tool = tool or find_tool("ncu")
    sections = [word for name in _NCU_SECTIONS for word in ("--section", name)]
    kernels = ["--kernel-name", f"regex:^({'|'.join(PROFILED)})$"]
    # The clocks stay as they are: by default the tool locks them to the base clock, unlike all other measurements.
    rest = ["--clock-control", "none", "--csv", "--log-file", str(out / "ncu.csv")]
    command = [tool, *sections, *kernels, *rest] if tool else None
    yield _under("ncu", command, [python, "-m", "bench_gpu.small_run", "profiled"], {}, clock, dry=dry)


def find_tool(name: str) -> str | None:
    """Return the path of a tool of the CUDA toolkit, or None."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(_FOLDERS))


def _under(
    tool: str, command: list[str] | None, program: list[str], env: dict[str, str], clock: Clock, *, dry: bool
) -> Row:
    """Run a part of `small_run` under a tool, or without it in a dry run."""
    row: Row = {"tool": tool, "part": program[-1]}
    if command is None and not dry:
        return row | {"skipped": f"{tool} is not installed"}
    limit_s = min(_LIMIT_S, clock.left_s)
    ended = run_program([*(command or ()), *program, *(["--dry"] if dry else ())], limit_s, env)
    if ended.returncode is None:
        return row | {"skipped": f"no end after {limit_s:.0f} s", "launches": len(ended.stdout.splitlines())}
    if "ERR_NVGPUCTRPERM" in ended.output:
        return row | {"skipped": "the driver lets only administrators read performance counters (ERR_NVGPUCTRPERM)"}
    _check(row, ended)
    if command is None:
        row["skipped"] = f"{tool} is not installed; the part ran without it"
    return row | {"launches": len(ended.stdout.splitlines())}


def _check(row: Row, ended: Ended) -> None:
    """Raise WrongResultError for a wrong result, RuntimeError for another failure."""
    where = f"{row['tool']} on {row['part']}"
    if ended.returncode == _FOUND_ERRORS or "WrongResultError" in ended.output:
        raise WrongResultError(f"{where}: {_errors_in(ended.output)}")
    if ended.returncode:
        raise RuntimeError(f"{where} ended with {ended.returncode}: {ended.output[-2000:]}")


def _errors_in(output: str) -> str:
    """Return the lines of the sanitizer's report, or the last lines of a program that raised."""
    lines = [line for line in output.splitlines() if re.match(r"=========\s+\S", line)]
    return "\n".join(lines[:20] or output.splitlines()[-5:])
