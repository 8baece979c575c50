"""How the GPU benchmark reads results of compute-sanitizer and Nsight Compute, tested with programs that end alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench_gpu import tools
from bench_gpu.measure import Clock
from bench_gpu.verdict import WrongResultError


@pytest.fixture
def clock() -> Clock:
    return Clock(torch.device("cpu"), 60.0)


def _program(folder: Path, script: str, name: str = "tool") -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_an_access_that_the_sanitizer_reports_is_a_wrong_result(tmp_path: Path, clock: Clock) -> None:
    tool = _program(tmp_path, 'echo "========= Invalid __global__ read of size 16 bytes"; exit 86')
    python = _program(tmp_path, "", "python")
    with pytest.raises(WrongResultError, match=r"compute-sanitizer on kernels: .*Invalid __global__ read"):
        list(tools.sanitized(clock, dry=False, tool=tool, python=python))


def test_the_allocator_hides_no_access_to_a_kernels_tensors(tmp_path: Path, clock: Clock) -> None:
    """Graphs need the allocator. Each part runs without the tool first: compilation takes none of the tool's time."""
    tool = _program(tmp_path, f'echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> {tmp_path}/said; echo a launch')
    python = _program(tmp_path, f'echo "alone $*" >> {tmp_path}/said', "python")
    rows = list(tools.sanitized(clock, dry=False, tool=tool, python=python))
    assert [(row["part"], row["launches"]) for row in rows] == [("kernels", 1), ("steps", 1)]
    first, kernels, then, steps = (tmp_path / "said").read_text().splitlines()
    assert (first, then) == ("alone -m bench_gpu.small_run kernels", "alone -m bench_gpu.small_run steps")
    assert kernels.startswith("1 --tool memcheck") and kernels.endswith("bench_gpu.small_run kernels")
    assert steps.startswith(" --tool memcheck") and steps.endswith("bench_gpu.small_run steps")


def test_a_part_that_is_wrong_without_the_sanitizer_is_told(tmp_path: Path, clock: Clock) -> None:
    tool, python = (
        _program(tmp_path, ""),
        _program(tmp_path, "echo bench_gpu.verdict.WrongResultError: x; exit 1", "py"),
    )
    with pytest.raises(WrongResultError, match=r"none on kernels: .*WrongResultError: x"):
        list(tools.sanitized(clock, dry=False, tool=tool, python=python))


def test_an_absent_tool_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> None:
    monkeypatch.setattr(tools, "find_tool", lambda name: None)
    rows = [*tools.sanitized(clock, dry=False), *tools.profiled(tmp_path, clock, dry=False)]
    assert [row["skipped"] for row in rows] == [*["compute-sanitizer is not installed"] * 2, "ncu is not installed"]


def test_a_driver_that_hides_its_counters_is_no_failure(tmp_path: Path, clock: Clock) -> None:
    tool = _program(tmp_path, "echo ==ERROR== ERR_NVGPUCTRPERM; exit 1")
    (row,) = tools.profiled(tmp_path, clock, dry=False, tool=tool)
    assert "ERR_NVGPUCTRPERM" in row["skipped"]


def test_the_profiler_leaves_the_gpus_clocks_alone(tmp_path: Path, clock: Clock) -> None:
    tool = _program(tmp_path, f"echo $* > {tmp_path}/said")
    list(tools.profiled(tmp_path, clock, dry=False, tool=tool))
    assert "--clock-control none" in (tmp_path / "said").read_text()


def test_a_tool_gets_no_more_time_than_its_stage_has(tmp_path: Path) -> None:
    tool = _program(tmp_path, "echo a launch; sleep 60")
    (row,) = tools.profiled(tmp_path, Clock(torch.device("cpu"), 0.2), dry=False, tool=tool)
    assert (row["skipped"], row["launches"]) == ("no end after 0 s", 1)


def test_a_tool_that_fails_is_told_with_its_output(tmp_path: Path, clock: Clock) -> None:
    tool = _program(tmp_path, "echo unknown option; exit 3")
    with pytest.raises(RuntimeError, match="ncu on profiled ended with 3: unknown option"):
        list(tools.profiled(tmp_path, clock, dry=False, tool=tool))
