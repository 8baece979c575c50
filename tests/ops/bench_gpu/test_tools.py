"""What the GPU benchmark makes of compute-sanitizer and Nsight Compute, by programs that end as those do."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_gpu import tools
from bench_gpu.verdict import WrongResultError


def _program(folder: Path, script: str) -> str:
    path = folder / "tool"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_an_access_that_the_sanitizer_reports_is_a_wrong_result(tmp_path: Path) -> None:
    tool = _program(tmp_path, 'echo "========= Invalid __global__ read of size 16 bytes"; exit 86')
    with pytest.raises(WrongResultError, match=r"compute-sanitizer on kernels: .*Invalid __global__ read"):
        list(tools.sanitized(dry=False, tool=tool))


def test_the_allocator_hides_no_access_to_a_kernels_tensors(tmp_path: Path) -> None:
    """Graphs need the allocator."""
    tool = _program(tmp_path, f'echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> {tmp_path}/said; echo a launch')
    rows = list(tools.sanitized(dry=False, tool=tool))
    assert [(row["part"], row["launches"]) for row in rows] == [("kernels", 1), ("steps", 1)]
    kernels, steps = (tmp_path / "said").read_text().splitlines()
    assert kernels.startswith("1 --tool memcheck") and kernels.endswith("bench_gpu.small_run kernels")
    assert steps.startswith(" --tool memcheck") and steps.endswith("bench_gpu.small_run steps")


def test_an_absent_tool_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tools, "find_tool", lambda name: None)
    rows = [*tools.sanitized(dry=False), *tools.profiled(tmp_path, dry=False)]
    assert [row["skipped"] for row in rows] == [*["compute-sanitizer is not installed"] * 2, "ncu is not installed"]


def test_a_driver_that_hides_its_counters_is_no_failure(tmp_path: Path) -> None:
    tool = _program(tmp_path, "echo ==ERROR== ERR_NVGPUCTRPERM; exit 1")
    (row,) = tools.profiled(tmp_path, dry=False, tool=tool)
    assert "ERR_NVGPUCTRPERM" in row["skipped"]


def test_a_tool_that_fails_is_told_with_its_output(tmp_path: Path) -> None:
    tool = _program(tmp_path, "echo unknown option; exit 3")
    with pytest.raises(RuntimeError, match="ncu on profiled ended with 3: unknown option"):
        list(tools.profiled(tmp_path, dry=False, tool=tool))
