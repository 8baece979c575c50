"""The machine code of exactly those Triton launches that the GPU runner's graphs make, compiled without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.kernels.triton.launches import shared_memory_kib
from penstock.kernels.triton.products import FEW_ROWS
from tests.kernels.triton.launch_sites import launched_kernels
from tests.source_tree import ROOT

Facts = dict[str, Any]
SHARDS = 8
"""Of the programs of one GPU generation; a run that is cut short keeps the shards that it came to."""
LOADS_WEIGHTS_FIRST = {"multiply_row", "multiply_row_int4"}
"""Kernels that read weights before they wait for the kernel ahead."""
REGISTERS = 65_536
"""Of a multiprocessor, from compute capability 8.0 on."""
SHARED_KIB = {80: 164, 90: 228}
"""Of a multiprocessor; each program takes one KiB beside its own (CUDA C++ Programming Guide)."""


class Compiler:
    """`compile_recorded.py` for one generation of GPUs. It compiles the shards that it is asked for, each once."""

    def __init__(self, capability: int, log: Path) -> None:
        self._log = log
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'ops'}:{ROOT / 'tests'}"
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.ops.bench_gpu.compile_recorded", str(capability), str(SHARDS)],
                env=env,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self.recorded = self._next()
        self._shards: dict[int, list[Facts]] = {}

    def shard(self, number: int) -> list[Facts]:
        """Return what is printed of each program of a shard."""
        if number not in self._shards:
            assert self._process.stdin is not None
            print(number, file=self._process.stdin, flush=True)
            facts: list[Facts] = []
            while "shard" not in (line := self._next()):
                facts.append(line)
            assert line == {"shard": number, "num_programs": len(facts)}
            self._shards[number] = facts
        return self._shards[number]

    def end(self) -> None:
        """End the process, which may be compiling."""
        self._process.kill()
        self._process.communicate()

    def _next(self) -> Facts:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._log.read_text()
        found: Facts = json.loads(line)
        return found


@pytest.fixture(scope="module", params=[90, 80])
def compiler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    """One process: it records the launches once."""
    folder: Path = tmp_path_factory.mktemp("recorded")
    compiler = Compiler(request.param, folder / "log")
    yield compiler
    compiler.end()


@pytest.fixture(params=[pytest.param(i, id=f"shard {i} of {SHARDS}") for i in range(SHARDS)])
def programs(request: pytest.FixtureRequest, compiler: Compiler) -> list[Facts]:
    """The programs of one shard; all shards together are all programs."""
    return compiler.shard(request.param)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_kernel_of_the_package_is_left_out(compiler: Compiler) -> None:
    assert set(compiler.recorded["kernels"]) == {name.lstrip("_") for name in launched_kernels()}
    assert compiler.recorded["num_launches"] > 2000


def _count(program: Facts, *prefixes: str) -> int:
    return sum(count for name, count in program["operations"].items() if name.startswith(prefixes))


def _allowed_stack_bytes(program: Facts) -> int:
    """Return what a program may spill: wide heads, quantized norms and the last draw a few numbers, others nothing."""
    if program["kernel"] == "prefill":
        return 192 if program["constants"]["HEAD"] > 128 else 16 if program["sm"] == 80 else 0
    is_quantized_norm = program["kernel"] == "add_norm" and program["dtype"] == "torch.int8"
    return 16 if is_quantized_norm or program["kernel"] == "draw_tokens" else 0


def _wanted_at_once(program: Facts) -> int:
    """Return 2 where memory limits a program."""
    # Products and attention of many rows keep the tensor cores busy with one program.
    has_many_rows = program["constants"].get("ROWS", 0) > FEW_ROWS
    # Rows of more than 16,384 numbers are quantized by 16 warps that keep the row in registers: activations, and at
    # load time the weights that they are multiplied with.
    is_wide_row = program["kernel"] in ("activate", "quantize") and program["warps"] == 16
    return 1 if has_many_rows or is_wide_row else 2


def _programs_at_once(program: Facts) -> int:
    """Return how many programs fit on a multiprocessor at once, by registers and shared memory."""
    registers, shared, warps = (int(program[name]) for name in ("registers", "shared", "warps"))
    per_warp = -(-registers * 32 // 256) * 256
    return min(REGISTERS // per_warp // warps, SHARED_KIB[program["sm"]] * 1024 // (shared + 1024))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_recorded_programs_use_registers_memory_and_tensor_cores_as_they_should(programs: list[Facts]) -> None:
    assert programs
    for program in programs:
        assert program["stack_bytes"] <= _allowed_stack_bytes(program), program
        assert program["shared"] <= 1024 * shared_memory_kib(program["sm"]), program
        assert _programs_at_once(program) >= _wanted_at_once(program), program
        # Also in machine code, as loads may not move ahead of the wait.
        is_first = program["kernel"] not in LOADS_WEIGHTS_FIRST
        assert program["waits_first"] is (is_first if program["is_dependent"] else None), program
        assert program["code_waits"] == (program["is_dependent"] and is_first), program
        if program["kernel"] == "prefill":
            assert _count(program, "HGMMA" if program["sm"] == 90 else "HMMA") > 0, program
            assert program["warps"] * 16 == program["constants"]["ROWS"], program
