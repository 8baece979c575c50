"""Every kernel compiles for Ampere and Hopper, also where there is no card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, object]]:
    """What `compile_all.py` says of each kernel, in the cache that a card would use too."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_all.py"))]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(600)
def test_every_kernel_becomes_ptx_for_both_generations(compiled: list[dict[str, object]]) -> None:
    from penstock.kernels import triton as package

    sources = [path for path in Path(package.__path__[0]).glob("*.py") if "[(" in path.read_text()]
    assert sources
    for capability in (80, 90):
        made = [facts for facts in compiled if facts["sm"] == capability]
        assert {facts["module"] for facts in made} >= {path.stem for path in sources}
        assert all(facts["is_ptx"] for facts in made)
        assert max(int(str(facts["shared"])) for facts in made) <= 99 * 1024  # what Ada has, least of all


@pytest.mark.timeout(600)
def test_hoppers_sums_of_float8_are_added_in_float32(compiled: list[dict[str, object]]) -> None:
    """Where rows are many; its products of few rows are of float16, and those of int8 are exact."""
    products = [facts for facts in compiled if facts["kernel"] == "_multiply_scaled" and facts["sm"] == 90]
    assert sorted(bool(facts["additions"]) for facts in products) == [False] * 4 + [True] * 2


@pytest.mark.timeout(600)
def test_steps_of_other_sizes_compile_nothing_anew(compiled: list[dict[str, object]]) -> None:
    hashes: dict[object, set[object]] = {}
    for facts in compiled:
        if facts["stage"] == "steps":
            hashes.setdefault(facts["kernel"], set()).add(facts["hash"])
    assert {"_decode", "_prefill", "_sample"} <= set(hashes)
    assert {kernel: len(found) for kernel, found in hashes.items() if len(found) > 1} == {}
