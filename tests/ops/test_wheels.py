"""The wheels: two builds have the same bytes, and the compiled kernels compute the bits of a local build."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from penstock import __version__
from penstock.cli.demo_model import demo_model
from penstock.kernels.cpu.probe import best_isa, cpu_flags
from tests.source_tree import ROOT

COMPUTE = """
import json, sys
from penstock import Engine, SamplingParams
from penstock.kernels.cpu.build import origin_of

model, isa = sys.argv[1:]
found = [origin_of(isa)]
for settings in ({}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16", "quantization": "none"}):
    engine = Engine(model, runner="native", num_kv_blocks=160, max_num_seqs=8, **settings)
    for chosen in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}):
        params = SamplingParams(max_tokens=32, logprobs=5, ignore_eos=True, **chosen)
        found += [repr(one) for one in engine.generate(["The gate opens", "Water boils at", "def f(n):"], params)]
print(json.dumps(found))
"""
REQUIREMENT = f"penstock-kernels=={__version__}; platform_machine == \"x86_64\" and extra == 'cpu'"


def computed(isa: str, kernels: Path | None = None) -> list[str]:
    """Return where a process takes its kernels from, and all that it computes."""
    env = os.environ | {"PYTHONSAFEPATH": "1"} | ({} if kernels is None else {"PYTHONPATH": str(kernels)})
    command = [sys.executable, "-c", COMPUTE, str(demo_model()), isa]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300)
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_two_builds_have_the_same_bytes_and_compute_the_same_bits(tmp_path: Path) -> None:
    isa = best_isa(cpu_flags())
    if isa is None:
        pytest.skip("this CPU has no native kernels")
    subprocess.run(["make", "build/wheels/.installed"], cwd=ROOT, check=True, capture_output=True)
    builder = [str(ROOT / "build/wheels/bin/python"), str(ROOT / "ops/wheels/build.py"), "--isa", isa]
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, umask in zip(folders, (0o022, 0o077), strict=True):
        # A commit between the two would change the time that they take from git.
        env = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
        command = [*builder, "--out", str(folder)]
        done = subprocess.run(command, cwd=tmp_path, env=env, umask=umask, check=True, capture_output=True, text=True)
        steps = re.findall(r"^\d\d:\d\d:\d\d (.+)$", done.stderr, re.MULTILINE)
        assert len(steps) == 2 and isa in steps[0], "a long build says what it does"
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first.keys() == {
        f"penstock_llm-{__version__}-py3-none-any.whl",
        f"penstock_kernels-{__version__}-py3-none-manylinux_2_28_x86_64.whl",
    }
    assert first == second

    kernels, ours = sorted(folders[0].iterdir())
    with zipfile.ZipFile(ours) as wheel:
        metadata = wheel.read(f"penstock_llm-{__version__}.dist-info/METADATA").decode()
    assert REQUIREMENT.replace("'", '"') in metadata.replace("'", '"')
    with zipfile.ZipFile(kernels) as wheel:
        wheel.extractall(tmp_path / "site")
    local, installed = computed(isa), computed(isa, tmp_path / "site")
    assert installed[0] == f"of penstock-kernels {__version__}" != local[0]
    assert installed[1:] == local[1:]
