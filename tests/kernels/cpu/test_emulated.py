"""The compiled kernels on processors that this machine only emulates: each gets a library that it can run, or none.

QEMU ends a program at an instruction that its processor does not have, as that processor would.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.tiny_model import make_tiny_model

from penstock.kernels.cpu.build import library_path
from penstock.kernels.cpu.probe import NO_ISA, REQUIRED_FLAGS, best_isa, cpu_flags
from penstock.runtime.cache_folders import cache_folder

QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(QEMU is None, reason="needs QEMU: apt-get install qemu-user"),
]

CPUID = """
#include <cpuid.h>
#include <cstdio>

int main() {
    struct { const char* name; unsigned leaf, reg, bit; } flags[] = {
        {"fma", 1, 2, 12}, {"movbe", 1, 2, 22}, {"f16c", 1, 2, 29}, {"abm", 0x80000001, 2, 5},
        {"bmi1", 7, 1, 3}, {"avx2", 7, 1, 5}, {"bmi2", 7, 1, 8},
        {"avx512f", 7, 1, 16}, {"avx512dq", 7, 1, 17}, {"avx512cd", 7, 1, 28}, {"avx512bw", 7, 1, 30},
        {"avx512vl", 7, 1, 31}, {"avx512_vnni", 7, 2, 11},
    };
    for (auto& flag : flags) {
        unsigned found[4] = {};
        __get_cpuid_count(flag.leaf, 0, &found[0], &found[1], &found[2], &found[3]);
        if (found[flag.reg] >> flag.bit & 1) std::printf("%s ", flag.name);
    }
}
"""
"""Says what the CPU says: QEMU's guests read the host's /proc/cpuinfo."""
COMPUTE = """
import json, sys
from unittest import mock
from penstock import Engine, PenstockError, SamplingParams
from penstock.gpu_node.model.native import load

model, flags = sys.argv[1], frozenset(sys.argv[2].split())
with mock.patch.object(load, "cpu_flags", lambda: flags):
    try:
        engine = Engine(model, runner="native", dtype="bfloat16", num_kv_blocks=32, max_num_seqs=4, num_threads=1)
    except PenstockError as error:
        sys.exit(error.message)
params = SamplingParams(max_tokens=8, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)
print(json.dumps([repr(one) for one in engine.generate(["the gate opens", "water"], params)]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("emulated") / "tiny")


@pytest.fixture(scope="module")
def cpuid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("cpuid") / "cpuid.cpp"
    source.write_text(CPUID)
    subprocess.run([os.environ.get("CXX", "g++"), "-O1", "-o", str(source.with_suffix("")), str(source)], check=True)
    return source.with_suffix("")


def flags_of(cpu: str, cpuid: Path) -> str:
    done = subprocess.run([str(QEMU), "-cpu", cpu, str(cpuid)], capture_output=True, text=True, check=True)
    return done.stdout


def compute(model: Path, flags: str, cpu: str = "") -> subprocess.CompletedProcess[str]:
    """Run the engine in a process, on a CPU that QEMU emulates or on this one."""
    emulator = [str(QEMU), "-cpu", cpu] if cpu else []
    words = [*emulator, sys.executable, "-c", COMPUTE, str(model), flags]
    # numpy's own library of matrix products takes QEMU's Nehalem for a Haswell.
    env = os.environ | ({"OPENBLAS_CORETYPE": cpu} if cpu else {})
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=800)


def test_an_emulated_haswell_runs_the_avx2_library_and_computes_the_same_bits(model: Path, cpuid: Path) -> None:
    if missing := REQUIRED_FLAGS["avx2"] - cpu_flags():
        pytest.skip(f"nothing to compare with: this CPU has no {', '.join(sorted(missing))}")
    library_path("avx2", cache_folder() / "native", lambda fraction: None)
    flags = flags_of("Haswell", cpuid)
    assert best_isa(flags.split()) == "avx2"
    emulated, here = compute(model, flags, "Haswell"), compute(model, " ".join(REQUIRED_FLAGS["avx2"]))
    assert (emulated.returncode, here.returncode) == (0, 0), emulated.stderr[-2000:] + here.stderr[-2000:]
    assert json.loads(emulated.stdout) == json.loads(here.stdout)


def test_an_emulated_nehalem_is_refused_by_name(model: Path, cpuid: Path) -> None:
    flags = flags_of("Nehalem", cpuid)
    assert best_isa(flags.split()) is None
    refused = compute(model, flags, "Nehalem")
    assert refused.returncode == 1
    assert NO_ISA in refused.stderr
