"""The GPU benchmark runs to its end on the CPU, with nothing but torch, triton and numpy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.source_tree import ROOT

RUN = """
import runpy, sys
from importlib.abc import MetaPathFinder

absent = sys.argv.pop(1).split(",")

class WithoutSome(MetaPathFinder):
    def __init__(self, finders):
        self._finders = finders

    def find_spec(self, name, path=None, target=None):
        # None, as where it is not installed: torch and the benchmark ask for packages that may be absent.
        if name.partition(".")[0] in absent:
            return None
        found = (finder.find_spec(name, path, target) for finder in self._finders)
        return next((spec for spec in found if spec is not None), None)

sys.meta_path[:] = [WithoutSome(sys.meta_path[:])]
runpy.run_module("bench_gpu", run_name="__main__")
"""
ABSENT = (
    *("pydantic", "redis", "msgpack", "gguf", "safetensors", "transformers", "tokenizers", "cachetools", "llguidance"),
    *("matplotlib", "psutil", "hypothesis"),
)


def _dry_run(out: Path, *stages: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'ops'}:{ROOT / 'tests'}", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", RUN, ",".join(ABSENT), "--dry", "--out", str(out)]
    command += ["--stages", *stages] if stages else []
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_dry_run_gets_through_all_stages(tmp_path: Path) -> None:
    done = _dry_run(tmp_path)
    assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in tmp_path.iterdir())
    names = ["bench-gpu.tar.gz", "headline.json", "headline.md", "kernels.json", "steps.json", "truth.json"]
    assert files == names
    with tarfile.open(tmp_path / "bench-gpu.tar.gz") as archive:
        packed = set(archive.getnames())
    assert packed >= {*names[1:], "further/trace.json", "further/trace.txt", "further/cpu.json"}
    truth, kernels, steps, headline = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("truth", "kernels", "steps", "headline")
    )
    assert all(found["ceilings"] == truth["ceilings"] and "failed" not in found for found in (kernels, steps, headline))
    checked = {str(row["check"]).split()[0].strip(",") for row in truth["kernels in bfloat16"]}
    assert [(row["part"], row["launches"] > 0) for row in truth["sanitizer"]] == [("kernels", True), ("steps", True)]
    assert [(row["part"], row["launches"] > 0) for row in steps["profiler"]] == [("profiled", True)]
    assert {(row["kernel"], row["rows"]) for row in kernels["sweep"]} == {
        ("decode_attention", 0),
        ("prefill_attention", 64),
        ("prefill_attention", 128),
    }
    want = {"rotate_and_store", "attention", "sample", "multiply_scaled", "multiply_int4", "multiply_invariant"}
    assert checked >= want | {
        "quantize_vectors",
        "add_lora",
        "copy_blocks",
        "add_norm",
        "gate_mul",
        "embed",
        "bound_logits",
    }
    assert truth["tiny: graph = eager"]
    assert truth["tiny independent launches: graph = eager"]
    assert truth["tiny deterministic: alone = in a batch"]
    assert all(row["fraction"] > 0 for row in kernels["kernels"])
    assert all(steps[f"tiny decode{other}"] for other in ("", ", cache by layer", ", independent launches"))
    ahead, after = steps["tiny load"]
    assert ahead["tokens"] == after["tokens"]
    assert ahead["steps_ahead"] > 0 == after["steps_ahead"]
    assert [row["goal"] for row in headline["table"]] == [0.0, 0.0, 1.0]


def test_a_dry_headline_measures_its_shapes(tmp_path: Path) -> None:
    """One stage by itself, the shortest; the others are in the slow test above."""
    done = _dry_run(tmp_path, "headline")
    assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "headline.json").read_text())["table"]
    assert all(row["fraction"] > 0 and row["tokens_s"] > 0 for row in table)
    assert table[0]["shape"] in (tmp_path / "headline.md").read_text()
