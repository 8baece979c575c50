"""Builds the wheels of penstock and penstock-kernels: `make wheels`. Two builds of one commit have the same bytes.

The bytes depend on the tracked files, on ops/wheels/requirements.txt (compiler, setuptools), on the zlib of this Python
and on SOURCE_DATE_EPOCH, by default the time of the last commit. They depend on no clock, user, folder or umask.

The kernels are compiled by Zig's clang, against glibc 2.28 and with its own C++ library inside, whatever this machine
has. The flags are those of a build at the first start (`penstock.kernels.cpu.build`).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = Path(__file__).resolve().parent / "kernels"
GLIBC = (2, 28)
TARGET = f"x86_64-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
"""Zig's name of the machine; the wheel's tag says the same (ops/wheels/kernels/setup.py)."""
ISAS = ("avx512", "avx512_vnni", "avx2")
_COMPILER = """#!/bin/sh
# Zig writes the names of processors with underscores.
for word; do
    case $word in -march=x86-64-v*) word=-march=x86_64_v${{word##*v}};; esac
    set -- "$@" "$word"
    shift
done
# With its usual limit, clang unrolls the loops over accumulators too late to keep them in registers: in 4-bit formats,
# steps of many sequences would take half as long again.
exec '{python}' -m ziglang c++ -target {target} -mllvm -unroll-threshold=5000 "$@"
"""
_COMPILE = """
import sys
from pathlib import Path
from penstock.kernels.cpu.build import SOURCES, prebuild
prebuild(sys.argv[1], Path(sys.argv[2]), extra_flags=(f"-ffile-prefix-map={SOURCES}=.", "-g0", "-Wl,-s"))
"""


class WheelError(Exception):
    """A wheel is not what its tag says."""


def build(out: Path, work: Path, isas: tuple[str, ...] = ISAS) -> list[Path]:
    """Build both wheels in the empty folder `work`. Return their paths in `out`."""
    os.umask(0o022)  # A wheel keeps the modes of its files, also of those that setuptools makes.
    env = os.environ | {
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct").strip(),
        "ZIG_GLOBAL_CACHE_DIR": str(work / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(work / "zig"),
        "PYTHONSAFEPATH": "1",
    }
    source = work / "penstock"
    _copy_tracked(source)
    version = _version(source)
    _require_kernels(source / "pyproject.toml", version)
    kernels = work / "penstock-kernels"
    _prepare_kernels(kernels, version)
    _compile(source, kernels / "penstock_kernels", isas, work, env)
    out.mkdir(parents=True, exist_ok=True)
    _tell("packs both wheels")
    wheels = [_wheel(folder, out, env) for folder in (source, kernels)]
    check_glibc(wheels[1])
    return wheels


def check_glibc(wheel: Path) -> str:
    """Return what auditwheel says about the wheel of kernels. Raises WheelError if it needs more than its tag says."""
    said = _run([sys.executable, "-m", "auditwheel", "show", str(wheel)], cwd=wheel.parent)
    tags = [(int(major), int(minor)) for major, minor in re.findall(r"manylinux_(\d+)_(\d+)_x86_64", said)]
    # The first is that of the file's name, the others are what its libraries need.
    if len(tags) < 2 or any(tag > GLIBC for tag in tags):
        raise WheelError(f"{wheel.name} is not consistent with glibc {GLIBC[0]}.{GLIBC[1]}:\n{said}")
    return said


def _copy_tracked(target: Path) -> None:
    """Copy the files that git tracks, each with the mode 644 or 755: a wheel keeps modes, which a umask changes."""
    for name in _git("ls-files", "-z").split("\0"):
        source, path = ROOT / name, target / name
        if not name or not os.path.lexists(source):
            continue
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        shutil.copyfile(source, path, follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def _version(source: Path) -> str:
    found = re.search(r'^version = "([^"]+)"$', (source / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise WheelError("pyproject.toml has no version")
    return found[1]


def _require_kernels(path: Path, version: str) -> None:
    """Make the extra [cpu] need the wheel of kernels. In a clone it does not: a clone compiles its own sources."""
    text, line = path.read_text(), f"    \"penstock-kernels=={version}; platform_machine == 'x86_64'\",\n"
    changed = text.replace("\ncpu = [\n", f"\ncpu = [\n{line}")
    if changed == text:
        raise WheelError("pyproject.toml has no extra [cpu]")
    path.write_text(changed)


def _prepare_kernels(target: Path, version: str) -> None:
    shutil.copytree(KERNELS, target, ignore=shutil.ignore_patterns("__pycache__"))
    project = target / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "0"', f'version = "{version}"'))
    shutil.copyfile(ROOT / "LICENSE", target / "LICENSE")
    zig = Path(str(find_spec("ziglang").origin)).parent  # type: ignore[union-attr]
    shutil.copyfile(zig / "lib/libcxx/LICENSE.TXT", target / "LICENSE-LLVM.txt")
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _compile(source: Path, folder: Path, isas: tuple[str, ...], work: Path, env: dict[str, str]) -> None:
    compiler = work / "zig-c++"
    compiler.write_text(_COMPILER.format(python=sys.executable, target=TARGET))
    compiler.chmod(0o755)
    for number, isa in enumerate(isas, 1):
        _tell(f"compiles the kernels for {isa}, {number} of {len(isas)}; each takes some minutes")
        command = [sys.executable, "-c", _COMPILE, isa, str(folder)]
        _run(command, cwd=work, env=env | {"PYTHONPATH": str(source / "src"), "CXX": str(compiler)})
    for path in folder.iterdir():
        path.chmod(0o644)


def _wheel(folder: Path, out: Path, env: dict[str, str]) -> Path:
    with tempfile.TemporaryDirectory(dir=out) as made:
        _run([sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", made, str(folder)], env=env)
        (wheel,) = Path(made).iterdir()
        return wheel.replace(out / wheel.name)


def _tell(step: str) -> None:
    """Say on stderr which step begins: the whole takes up to a quarter of an hour."""
    print(f"{time.strftime('%H:%M:%S')} {step}", file=sys.stderr, flush=True)


def _git(*words: str) -> str:
    return _run(["git", *words], cwd=ROOT)


def _run(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def main() -> None:
    """Build into a folder, and print each wheel with its SHA-256."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels (default: dist)")
    parser.add_argument("--isa", choices=ISAS, action="append", help="only this instruction set, for tests")
    chosen = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-wheels-") as work:
            wheels = build(chosen.out.resolve(), Path(work), tuple(chosen.isa or ISAS))
    except WheelError as error:
        sys.exit(f"wheels: {error}")
    for wheel in wheels:
        print(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel}")


if __name__ == "__main__":
    main()
