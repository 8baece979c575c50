"""The machine code of exactly those Triton launches that the GPU runner's graphs make, compiled without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from penstock.kernels.triton.launches import shared_memory_kib
from penstock.kernels.triton.products import FEW_ROWS
from tests.kernels.triton.launch_sites import launched_kernels
from tests.source_tree import ROOT

Facts = dict[str, Any]
REGISTERS = 65_536
"""Of a multiprocessor, from compute capability 8.0 on."""
SHARED_KIB = {80: 164, 90: 228}
"""Of a multiprocessor; each program takes one KiB beside its own (CUDA C++ Programming Guide)."""


@pytest.fixture(scope="module", params=[80, 90])
def programs(request: pytest.FixtureRequest) -> list[Facts]:
    """What `compile_recorded.py` says of each program."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'ops'}:{ROOT / 'tests'}"
    command = [sys.executable, "-m", "tests.ops.bench_gpu.compile_recorded", str(request.param)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=2400, check=False)
    assert done.returncode == 0, done.stderr
    *facts, totals = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(facts) == totals["num_programs"] < totals["num_launches"]
    # No kernel of the package is left out.
    assert {program["kernel"] for program in facts} == {name.lstrip("_") for name in launched_kernels()}
    return facts


def _count(program: Facts, *prefixes: str) -> int:
    return sum(count for name, count in program["operations"].items() if name.startswith(prefixes))


def _allowed_stack_bytes(program: Facts) -> int:
    """Return what a program may spill: wide heads, quantized norms and the last draw a few numbers, others nothing."""
    if program["kernel"] == "prefill":
        return 192 if program["constants"]["HEAD"] > 128 else 16 if program["sm"] == 80 else 0
    is_quantized_norm = program["kernel"] == "add_norm" and program["dtype"] == "torch.int8"
    return 16 if is_quantized_norm or program["kernel"] == "draw_tokens" else 0


def _programs_at_once(program: Facts) -> int:
    """Return how many programs fit on a multiprocessor at once, by registers and shared memory."""
    registers, shared, warps = (int(program[name]) for name in ("registers", "shared", "warps"))
    per_warp = -(-registers * 32 // 256) * 256
    return min(REGISTERS // per_warp // warps, SHARED_KIB[program["sm"]] * 1024 // (shared + 1024))


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_recorded_programs_keep_their_numbers_in_registers(programs: list[Facts]) -> None:
    for program in programs:
        assert program["stack_bytes"] <= _allowed_stack_bytes(program), program


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_recorded_programs_fit_on_a_multiprocessor_twice_where_memory_limits_them(programs: list[Facts]) -> None:
    for program in programs:
        assert program["shared"] <= 1024 * shared_memory_kib(program["sm"]), program
        # Products and attention of many rows keep the tensor cores busy with one program.
        has_many_rows = program["constants"].get("ROWS", 0) > FEW_ROWS
        # Activations of more than 16,384 numbers are quantized by 16 warps that keep the row in registers.
        is_wide_row = program["kernel"] == "activate" and program["warps"] == 16
        assert _programs_at_once(program) >= (1 if has_many_rows or is_wide_row else 2), program


@pytest.mark.slow
@pytest.mark.timeout(2500)
def test_recorded_prefill_multiplies_by_warp_groups_on_hopper(programs: list[Facts]) -> None:
    for program in (program for program in programs if program["kernel"] == "prefill"):
        assert _count(program, "HGMMA" if program["sm"] == 90 else "HMMA") > 0, program
        assert program["warps"] * 16 == program["constants"]["ROWS"], program
