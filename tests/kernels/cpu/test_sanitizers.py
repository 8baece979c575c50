"""The tests of the native kernels once more, compiled with sanitizers that end the process at what they find."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.native import ISAS, SANITIZE, built

from penstock.kernels.cpu import build
from penstock.kernels.cpu.probe import REQUIRED_FLAGS, cpu_flags

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TESTS = Path(__file__).parents[2]
WATCHED = [
    *(TESTS / "kernels" / "cpu" / f"test_{name}.py" for name in ("weights", "products", "functions", "sampler")),
    TESTS / "kernels" / "cpu" / "test_attention.py",
    TESTS / "gpu_node" / "model" / "native" / "test_invariance.py",
    TESTS / "gpu_node" / "model" / "native" / "test_load.py",
]


@pytest.fixture(scope="module")
def gcc() -> str:
    """GCC, whose sanitizers' libraries a Python process can load in front."""
    found = shutil.which("g++")
    if found is None:
        pytest.skip("no g++")
    return found


def _library(gcc: str, name: str) -> str:
    done = subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    if not Path(done.stdout.strip()).is_absolute():
        pytest.skip(f"{gcc} has no {name}")
    return done.stdout.strip()


@pytest.fixture(scope="module")
def watched_libraries(gcc: str) -> Iterator[str]:
    """Builds them before the sanitizers are loaded in front of all, compilers too; names the sanitizers."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(SANITIZE, "address,undefined")
        environment.setenv("CXX", gcc)
        for isa in ISAS:
            if cpu_flags() >= REQUIRED_FLAGS[isa]:
                built(isa)
        yield "address,undefined"


@pytest.mark.parametrize("path", WATCHED, ids=lambda path: path.stem)
def test_no_kernel_leaves_its_memory_or_the_language(gcc: str, watched_libraries: str, path: Path) -> None:
    # libstdc++ in front too: torch throws before it would be loaded.
    preloaded = [_library(gcc, name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    environment = {
        SANITIZE: watched_libraries,
        "CXX": gcc,
        "LD_PRELOAD": " ".join(preloaded),
        # Python keeps what it has until it ends.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--capture=sys",
        "--timeout",
        "1200",
        str(path),
    ]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


def test_threads_of_a_team_do_not_race(gcc: str, tmp_path: Path) -> None:
    _library(gcc, "libtsan.so")
    program = tmp_path / "team"
    flags = ("-std=c++20", "-O1", "-g", "-pthread", "-mavx2", "-fsanitize=thread", f"-I{build.SOURCES}")
    subprocess.run([gcc, *flags, str(Path(__file__).with_name("team_check.cpp")), "-o", str(program)], check=True)
    done = subprocess.run([program], env={"TSAN_OPTIONS": "halt_on_error=1"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-5000:]
