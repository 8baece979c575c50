"""Compiles the C++ kernels once per source version, instruction set and compiler. Images and a wheel ship the result.

The wheel penstock-kernels has them for every instruction set. Its libraries are named by the digest of their sources,
so that a library of other sources is never loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from penstock.kernels.cpu.probe import Isa, usable_cores

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Libraries that an image ships, for machines without a compiler."""
SHARED = Path(__file__).parent / "built"
"""Builds for all users of this installation. Only its owner writes them, and could change the sources as well."""
PACKAGE = "penstock_kernels"
"""The package of the wheel with compiled libraries."""

_ISA_FLAGS: dict[Isa, tuple[str, ...]] = {
    "avx512": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-DPENSTOCK_AVX512", "-DPENSTOCK_BF16"),
    "avx512_vnni": ("-march=x86-64-v4", "-mavx512vnni", "-DPENSTOCK_AVX512"),
    "avx2": ("-march=x86-64-v3",),
}
# -ffp-contract=off: each compiler would fuse other sums, and so round differently.
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off")
_COMPILERS = ("g++", "clang++", "c++")
_TIMEOUT_S = 600
_WATCHED = """
import os, signal, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, process_group=0)
def end():
    os.read(0, 1)
    os.killpg(child.pid, signal.SIGKILL)
threading.Thread(target=end, daemon=True).start()
sys.exit(1 if child.wait() else 0)
"""
"""A program that runs a command in a process group of its own, and kills the group when its stdin is closed."""


BUILD_REMEDY = "install a C++ compiler that supports C++20, such as g++ (Debian, Ubuntu: apt install g++)"
"""What an operator does about a BuildError."""


class BuildError(Exception):
    """The kernels cannot be built on this machine; the text gives the reason."""


def library_path(
    isa: Isa,
    cache: Path,
    progress: Callable[[float], None],
    *,
    extra_flags: Sequence[str] = (),
    extra_sources: Sequence[Path] = (),
) -> Path:
    """Return the compiled kernels: a prebuilt library, an earlier build in `cache` or beside the sources, or a new one.

    A new build calls `progress` with the fraction that is done. Tests give the extras: flags for compiler and linker,
    and sources to compile in. Raises BuildError if there is no compiler or the build fails.
    """
    prebuilt = prebuilt_library(isa)
    if prebuilt is not None and not extra_flags and not extra_sources:
        return prebuilt
    compiler, sources = _compiler(), (*_sources(), *extra_sources)
    flags = (*_FLAGS, *_ISA_FLAGS[isa], *extra_flags)
    path = cache / f"penstock-cpu-{isa}-{_digest(' '.join(flags), _version(compiler), sources=sources)}.so"
    is_for_all = not extra_flags and not extra_sources
    if is_for_all and not os.access(path, os.R_OK) and (shared := SHARED / path.name).is_file():
        return shared
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not through a link, and without truncation: a foreign link would otherwise empty the file that it names.
        flags_of_lock = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(path.with_suffix(".lock"), flags_of_lock, 0o600), "r+b") as lock:
            # Other processes wait, rather than compile the same beside this one. The lock ends with its process.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                _build(compiler, flags, sources, path, progress)
    if is_for_all:
        _share(path, isa)
    return path


def _share(path: Path, isa: Isa) -> None:
    """Copy a build beside the sources if this user owns them, so that no other user, as in a container, compiles."""
    try:
        if SHARED.parent.stat().st_uid != os.geteuid() or (SHARED / path.name).exists():
            return
        SHARED.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=SHARED) as folder:
            new = shutil.copyfile(path, Path(folder) / path.name)
            new.chmod(0o644)
            for old in SHARED.glob(f"penstock-cpu-{isa}-*.so"):
                old.unlink()
            new.rename(SHARED / path.name)
    except OSError:
        # Such as an installation on a read-only file system. The build in the cache is enough for this user.
        return


def origin_of(isa: Isa) -> str:
    """Describe where `library_path` takes the kernels from. Raises BuildError if there is no compiler."""
    package = _package_folder()
    version = "" if package is None else f"{PACKAGE.replace('_', '-')} {importlib.metadata.version(PACKAGE)}"
    if (found := prebuilt_library(isa)) is not None:
        return f"of {version}" if found.parent == package else "prebuilt"
    other = f"; {version} has kernels of other sources" if version else ""
    return f"built by {_compiler()} at the first start{other}"


def prebuild(isa: Isa, folder: Path | None = None, *, extra_flags: Sequence[str] = ()) -> Path:
    """Compile into a folder, by default of the package itself, while an image is built. Return the library."""
    path = (folder or PREBUILT) / prebuilt_name(isa)
    _build(_compiler(), (*_FLAGS, *_ISA_FLAGS[isa], *extra_flags), _sources(), path, lambda _fraction: None)
    return path


def prebuilt_name(isa: Isa) -> str:
    """Return the name of the library of these sources for an instruction set."""
    return f"penstock-cpu-{isa}-{_digest(sources=_sources())}.so"


def prebuilt_library(isa: Isa) -> Path | None:
    """Return the library of these sources that this package or the wheel of kernels ships."""
    folders = [folder for folder in (PREBUILT, _package_folder()) if folder is not None and folder.is_dir()]
    return next((path for folder in folders if (path := folder / prebuilt_name(isa)).is_file()), None)


def _package_folder() -> Path | None:
    spec = find_spec(PACKAGE)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _sources() -> list[Path]:
    return list(SOURCES.rglob("*.cpp"))


def _digest(*more: str, sources: Sequence[Path]) -> str:
    files = sorted((*sources, *SOURCES.rglob("*.h")))
    return _digest_of(more, tuple((file, _stamp(file)) for file in files))


def _stamp(file: Path) -> tuple[int, int, int]:
    """Return values that change when a file is written or replaced."""
    status = file.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


@cache
def _digest_of(more: Sequence[str], stamped_files: Sequence[tuple[Path, tuple[int, int, int]]]) -> str:
    """Return a digest of words and of files' names and content. It reads a file anew when its stamp changes."""
    digest = hashlib.blake2b("\n".join(more).encode(), digest_size=8)
    for file, _ in stamped_files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C++ compiler: looked for {wanted or ', '.join(_COMPILERS)}")


@cache
def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _build(
    compiler: str, flags: Sequence[str], sources: Sequence[Path], path: Path, progress: Callable[[float], None]
) -> None:
    """Compile in a temporary folder, then rename, so that a process that is killed leaves no incomplete library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name decides between equal sizes, so that two builds of a wheel link in one order.
    sources = sorted(sources, key=lambda source: (-source.stat().st_size, source.name))
    progress(0.0)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(usable_cores()) as pool:
            compiled = [
                pool.submit(_run, [compiler, *flags, f"-I{SOURCES}", "-c", str(source), "-o", str(target)])
                for source, target in zip(sources, objects, strict=True)
            ]
            try:
                for done, future in enumerate(as_completed(compiled), start=1):
                    future.result()
                    progress(done / (len(sources) + 1))
            except BuildError:
                pool.shutdown(cancel_futures=True)
                raise
        linked = Path(folder) / path.name
        _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(linked)])
        with linked.open("rb") as file:
            # A file that is renamed before its content is on disk may be empty after a power failure.
            os.fsync(file.fileno())
        linked.chmod(0o755)
        linked.rename(path)
    progress(1.0)


def _run_with_this_process(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. It is killed, with the processes that it starts, when this process ends."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WATCHED, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Not `communicate`, which closes stdin.
    with process, ThreadPoolExecutor(2) as readers:
        texts = [readers.submit(pipe.read) for pipe in (process.stdout, process.stderr) if pipe is not None]
        try:
            process.wait(_TIMEOUT_S)
        finally:
            if process.stdin is not None:
                process.stdin.close()
        return subprocess.CompletedProcess(command, process.returncode, *(text.result() for text in texts))


def _run(command: Sequence[str]) -> str:
    try:
        done = _run_with_this_process(command)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def main() -> None:
    """`python -m penstock.kernels.cpu.build`: compile into the package for every instruction set."""
    for isa in _ISA_FLAGS:
        sys.stdout.write(f"{prebuild(isa)}\n")


if __name__ == "__main__":
    main()
