"""The GPU tests start, and the kernels compile, where only torch, triton, numpy and pytest are installed.

`make gpu-venv` installs such a machine's own versions, Triton 3.6.0 on Python 3.12; these tests use it if it is there.
Otherwise they link packages of this environment into an empty one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.triton.launch_sites import launched_kernels
from tests.source_tree import ROOT

PACKAGES = ("torch", "triton", "numpy", "pytest")
OLDEST_TRITON = "3.6.0"
INSTALLED: Path = ROOT / "build/gpu-venv/bin/python"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with these packages and what they require; nothing else can be imported."""
    if INSTALLED.exists():
        return INSTALLED
    folder: Path = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (target,) = folder.glob("lib/python*/site-packages")
    for found in _closure(PACKAGES):
        for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (target / name).exists():
                (target / name).symlink_to(Path(str(found.locate_file(name))))
    return Path(folder, "bin/python")


def _closure(names: tuple[str, ...]) -> Iterator[Distribution]:
    waiting, known = list(names), set(names)
    while waiting:
        yield (found := distribution(waiting.pop()))
        required = [line for line in found.requires or () if "extra ==" not in line and "platform" not in line]
        for name in (re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in required if ";" not in line):
            if name not in known:
                known.add(name)
                waiting.append(name)


def _run(python: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{ROOT}:{ROOT / 'ops'}:{ROOT / 'tests'}"
    usual = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    return subprocess.run([python, *words], env=usual | env, cwd=ROOT, capture_output=True, text=True, timeout=800)


def _rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_bare_machine_has_no_other_packages(bare_python: Path) -> None:
    for name in ("redis", "pydantic", "pytest_asyncio", "hypothesis", "transformers"):
        assert "ModuleNotFoundError" in _run(bare_python, "-c", f"import {name}").stderr


def test_every_file_is_collected(bare_python: Path) -> None:
    rows = _rows(_run(bare_python, "-m", "bench_gpu.suite", "--collect-only"))
    assert all(row["is_ok"] for row in rows), rows
    counts = {row["file"]: int((re.match(r"(\d+)", row["summary"]) or [0, 0])[1]) for row in rows}
    collected = {Path(name).stem for name, count in counts.items() if count}
    assert collected >= {"test_attention", "test_layers", "test_products", "test_sampler", "test_bare_runner"}


def test_tests_of_kernels_and_runner_pass(bare_python: Path) -> None:
    rows = _rows(_run(bare_python, "-m", "bench_gpu.suite", "-m", "not slow", "-k", "not compile"))
    assert all(row["is_ok"] for row in rows), rows
    assert sum(" passed" in row["summary"] for row in rows) >= 8


@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_kernel_compiles_with_the_oldest_triton(bare_python: Path, capability: str, tmp_path: Path) -> None:
    env = {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    if f"{OLDEST_TRITON}\n" not in _run(bare_python, "-c", "import triton; print(triton.__version__)").stdout:
        older = tmp_path / "triton"
        words = ["pip", "install", "--quiet", "--no-deps", "--target", str(older), f"triton=={OLDEST_TRITON}"]
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"triton {OLDEST_TRITON} cannot be installed: {done.stderr[-300:]}")
        env["PYTHONPATH"] = f"{older}:{ROOT}:{ROOT / 'ops'}:{ROOT / 'tests'}"
    rows = _rows(_run(bare_python, "tests/kernels/triton/compile_all.py", capability, **env))
    assert all(row["is_ptx"] for row in rows)
    assert {row["kernel"] for row in rows} == launched_kernels()
