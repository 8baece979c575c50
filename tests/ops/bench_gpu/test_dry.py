"""The GPU benchmark runs to its end on the CPU, with nothing but torch, triton and numpy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT

RUN = """
import runpy, sys
from importlib.abc import MetaPathFinder

absent = sys.argv.pop(1).split(",")

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from fakes.interpreter import mend
mend()
runpy.run_module("bench_gpu", run_name="__main__")
"""
ABSENT = (
    *("pydantic", "redis", "msgpack", "gguf", "safetensors", "transformers", "tokenizers", "cachetools", "llguidance"),
    *("matplotlib", "psutil"),
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_dry_run_gets_through_all_stages(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'ops'}:{ROOT / 'tests'}", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", RUN, ",".join(ABSENT), "--dry", "--out", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    stages = ("decode", "prefill", "load", "trace")
    names = {"dry", "limits", "errors", "kernels", "tuned", *(f"tiny {stage}" for stage in ("model", *stages))}
    names |= {"tiny fp8 model", "tiny fp8 decode"}
    assert set(found) == names
    assert max(found["errors"].values()) < 1e-5
    assert all(row["ms"] > 0 for row in found["kernels"])
    assert len(found["tiny decode"]) == 4
    ahead, after = found["tiny load"]
    assert ahead["tokens"] == after["tokens"] and ahead["steps_ahead"] > 0 == after["steps_ahead"]
    assert json.loads((tmp_path / "tiny-trace.json").read_text())["traceEvents"]
    assert (tmp_path / "tiny-decode.svg").read_text().startswith("<svg")
    assert set(json.loads((tmp_path / "cpu.json").read_text())) == {"decode_attention", "prefill_attention"}


OF_NO_USE = """
import json, sys
from pathlib import Path
from types import SimpleNamespace

from bench_gpu import kernels
from bench_gpu.__main__ import Run
from penstock.kernels.triton.launches import Launch
from triton.runtime.errors import OutOfResources

def refuse(launch):
    if launch.tile > 64:
        raise OutOfResources(300_000, 232_448, "shared memory")

def tune():
    kernels._decode = kernels._prefill = lambda sizes, device: (refuse, 0, 0)
    clock = SimpleNamespace(device=None, left_s=1.0, device_ms=lambda work, repeats: work() or 1.0)
    return kernels.tune(kernels.DRY, clock, dry=False)

run = Run(Path(sys.argv[1]), dry=True)
run._stage("broken", lambda: 1 / 0)
run._stage("tuned", tune)
"""


def test_a_stage_that_fails_is_named_and_those_behind_it_are_measured(tmp_path: Path) -> None:
    """Tuning tries launches that need more shared memory than the GPU has."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'ops'}", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", OF_NO_USE, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found["failed"]) == ["broken"] and "ZeroDivisionError" in done.stderr
    assert all(launch[0] <= 64 for shapes in found["tuned"].values() for launch in shapes.values())
    assert set(found["tuned"]) == {"decode_attention", "prefill_attention"}
