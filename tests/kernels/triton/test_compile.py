"""Every kernel compiles for Ampere and Hopper, also where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT

Facts = list[dict[str, object]]


@pytest.fixture(scope="module", params=[pytest.param(80, marks=pytest.mark.slow), 90])
def compiled(request: pytest.FixtureRequest) -> Facts:
    """What `compile_all.py` says of each kernel, in the cache that a GPU would use too."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_all.py")), str(request.param)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(600)
def test_every_kernel_becomes_ptx(compiled: Facts) -> None:
    from penstock.kernels import triton as package

    sources = [path for path in Path(package.__path__[0]).glob("*.py") if "[(" in path.read_text()]
    assert sources
    assert {facts["module"] for facts in compiled} >= {path.stem for path in sources}
    assert all(facts["is_ptx"] for facts in compiled)
    assert max(int(str(facts["shared"])) for facts in compiled) <= 99 * 1024  # what Ada has, least of all


@pytest.mark.timeout(600)
def test_hoppers_sums_of_float8_are_added_in_float32(compiled: Facts) -> None:
    """Where rows are many; products of few are of float16, and those of int8, all that Ampere has, are exact."""
    products = [facts for facts in compiled if facts["kernel"] == "_multiply_scaled"]
    want = {80: [False] * 3, 90: [False] * 4 + [True] * 2}[int(str(products[0]["sm"]))]
    assert sorted(bool(facts["additions"]) for facts in products) == want


@pytest.mark.timeout(600)
def test_steps_of_other_sizes_compile_nothing_anew(compiled: Facts) -> None:
    hashes: dict[object, set[object]] = {}
    for facts in compiled:
        if facts["stage"] == "steps":
            hashes.setdefault(facts["kernel"], set()).add(facts["hash"])
    assert {"_decode", "_prefill", "_sample"} <= set(hashes)
    assert {kernel: len(found) for kernel, found in hashes.items() if len(found) > 1} == {}
