"""Every kernel compiles for Ampere and Hopper, also where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.cover import FULL

from penstock.kernels.triton.launches import shared_memory_kib
from tests.kernels.triton.launch_sites import launched_kernels
from tests.source_tree import ROOT

Facts = list[dict[str, Any]]
LOADS_WEIGHTS_FIRST = {"_multiply_row", "_multiply_row_int4"}
"""Kernels that read weights before they wait for the kernel ahead."""

HOPPER_ONLY = {"_multiply_row", "_multiply_few"}
"""Products that are launched on Hopper alone (`is_for_few`)."""

FLOAT8_ONLY = {"_quantize_blocks", "_multiply_blocks"}
"""Kernels that GPUs before Ada have no use for."""


@pytest.fixture(scope="module", params=[pytest.param(80, marks=pytest.mark.slow), 90])
def compiled(request: pytest.FixtureRequest) -> Facts:
    """The output of `compile_all.py` for each kernel. It compiles what has changed since the file of known programs."""
    return _compiled(request.param, *(() if FULL else ("--known",)))


@pytest.fixture(scope="module", params=[(80,), (89,), (90,), (90, "--dependent")], ids=str)
def binaries(request: pytest.FixtureRequest) -> Facts:
    """The output of `compile_all.py` for each kernel and its machine code."""
    return _compiled(*request.param, "--binaries")


def _compiled(capability: int, *options: str, **variables: str) -> Facts:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])]), **variables}
    command = [sys.executable, str(Path(__file__).with_name("compile_all.py")), str(capability), *options]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _is_launched(facts: dict[str, Any]) -> bool:
    return facts["sm"] >= 90 or facts["kernel"] not in HOPPER_ONLY


@pytest.mark.timeout(600)
def test_every_kernel_becomes_ptx(compiled: Facts) -> None:
    assert {"_decode", "_prefill", "_embed", "scan_tiles"} < launched_kernels()
    has_float8 = compiled[0]["sm"] >= 89
    assert {facts["kernel"] for facts in compiled} == launched_kernels() - (set() if has_float8 else FLOAT8_ONLY)
    assert all(facts["is_ptx"] for facts in compiled)
    for facts in filter(_is_launched, compiled):
        assert facts["shared"] <= 1024 * shared_memory_kib(facts["sm"]), facts


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_file_of_known_programs_says_what_the_compiler_says(tmp_path: Path) -> None:
    anew = {facts["hash"]: facts for facts in _compiled(90, TRITON_CACHE_DIR=str(tmp_path))}
    assert {facts["hash"]: facts for facts in _compiled(90, "--known")} == anew


@pytest.mark.timeout(600)
def test_hoppers_sums_of_float8_are_added_in_float32(compiled: Facts) -> None:
    """Where rows are many; products of few are of float16, and those of int8, all that Ampere has, are exact."""
    products = [facts for facts in compiled if facts["kernel"] == "_multiply_scaled"]
    want = {80: [False] * 5, 90: [False] * 8 + [True] * 2}[products[0]["sm"]]
    assert sorted(bool(facts["additions"]) for facts in products) == want


@pytest.mark.timeout(600)
def test_steps_of_other_sizes_compile_nothing_anew(compiled: Facts) -> None:
    hashes: dict[object, set[object]] = {}
    for facts in compiled:
        if facts["stage"] == "steps":
            hashes.setdefault(facts["kernel"], set()).add(facts["hash"])
    assert {"_decode", "_prefill", "scan_tiles", "draw_tokens"} <= set(hashes)
    assert {kernel: len(found) for kernel, found in hashes.items() if len(found) > 1} == {}


@pytest.mark.timeout(600)
def test_kernels_wait_for_the_kernel_ahead_only_if_they_are_launched_as_dependents(compiled: Facts) -> None:
    """Which GPUs before Hopper do not support."""
    dependents = [facts for facts in compiled if facts["stage"] == "dependents"]
    assert {facts["kernel"] for facts in dependents} == {"_add_norm", "_activate", "_decode", "_merge"}
    for facts in compiled:
        is_dependent = facts["sm"] >= 90 and facts["stage"] == "dependents"
        assert facts["is_dependent"] == is_dependent, facts
        assert facts["waits_first"] is (True if is_dependent else None), facts


def _count(facts: dict[str, Any], prefix: str) -> int:
    return sum(count for name, count in facts["operations"].items() if name.startswith(prefix))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_keep_their_numbers_in_registers_and_fit_into_shared_memory(binaries: Facts) -> None:
    """Prefill of wide heads or quantized caches may spill some, and the last draw from a small vocabulary.

    Float32 in heads of 256 does, as no model needs it.
    """
    for facts in filter(_is_launched, binaries):
        assert facts["shared"] <= 1024 * shared_memory_kib(facts["sm"]), facts
        is_wide = facts["constants"].get("HEAD", 0) > 128
        if is_wide and facts["dtype"] == "torch.float32":
            continue
        may_spill = facts["kernel"] == "_prefill" and (is_wide or facts["constants"]["QUANTIZED"])
        is_small_draw = facts["kernel"] == "draw_tokens" and facts["constants"]["TILES"] == 1
        most = 128 if facts["constants"].get("HEAD", 0) > 256 else 64
        assert facts["stack_bytes"] <= (most if may_spill else 16 if is_small_draw else 0), facts


def _has_one_stage(facts: dict[str, Any]) -> bool:
    """Queries of 512 numbers leave no room for a second tile of keys in the shared memory of Ada and consumer GPUs."""
    is_small = shared_memory_kib(facts["sm"]) < 128
    return is_small and facts["kernel"] == "_prefill" and facts["constants"]["HEAD"] > 256


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_attention_multiplies_and_loads_as_the_gpu_does_it_fastest(binaries: Facts) -> None:
    found = [facts for facts in binaries if facts["kernel"] in ("_decode", "_prefill") and not _has_one_stage(facts)]
    for facts in (facts for facts in found if facts["dtype"] == "torch.bfloat16"):
        assert _count(facts, "LDGSTS") > 0, facts
        assert _count(facts, "F2F") == 0, f"converts float8 in more than one step: {facts}"
        if facts["kernel"] == "_prefill":
            assert facts["warps"] * 16 == facts["constants"]["ROWS"] * (2 if facts["constants"]["HEAD"] > 256 else 1)
            assert _count(facts, "HGMMA" if facts["sm"] == 90 else "HMMA") > 0, facts
    plain = [facts for facts in found if not facts["constants"]["QUANTIZED"]]
    assert all(_count(facts, "LDGSTS.E.BYPASS.128") > 0 for facts in plain if facts["dtype"] == "torch.bfloat16")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_programs_of_a_step_wait_first_also_in_machine_code(binaries: Facts) -> None:
    dependents = {facts["kernel"] for facts in binaries if facts["is_dependent"]}
    unused = {"_copy", "_mark", "_mask"} | (set() if binaries[0]["sm"] >= 89 else FLOAT8_ONLY)
    assert dependents in (set(), launched_kernels() - unused)
    for facts in binaries:
        is_first = facts["kernel"] not in LOADS_WEIGHTS_FIRST
        assert facts["waits_first"] is (is_first if facts["is_dependent"] else None), facts
        assert facts["code_waits"] == (facts["is_dependent"] and is_first), facts
