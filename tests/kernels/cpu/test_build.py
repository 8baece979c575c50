"""Building: once for what it depends on, whole or not at all, and a named error where it cannot be."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.waiting import wait_until

from penstock.kernels.cpu import build
from penstock.kernels.cpu.build import BuildError, library_path, prebuild
from penstock.kernels.cpu.probe import Isa

ISA: Isa = "avx2"
TINY = 'extern "C" __attribute__((visibility("default"))) int answer() { return %s; }\n'


def _silent(_fraction: float) -> None:
    """Ignore the progress."""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile in no time, in place of the kernels, and no prebuilt library."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "answer.cpp").write_text('#include "value.h"\n' + TINY % "VALUE")
    (folder / "other.cpp").write_text("int other() { return 1; }\n")
    (folder / "value.h").write_text("#define VALUE 42\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "SHARED", tmp_path / "built")
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    monkeypatch.setenv("CXX", "g++")
    return folder


@pytest.fixture
def compiler_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Stands a compiler in front of the real one that notes what it is called for."""
    log, wrapper = tmp_path / "calls", tmp_path / "counting-g++"
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in --version) ;; *) echo x >> {log};; esac\nexec g++ "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(wrapper))
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


def _answer(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


def test_a_second_call_compiles_nothing(sources: Path, tmp_path: Path, compiler_calls: Callable[[], int]) -> None:
    fractions: list[float] = []
    path = library_path(ISA, tmp_path / "cache", fractions.append)
    assert _answer(path) == 42
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] == 1
    assert compiler_calls() == 3  # two sources, one link
    fractions.clear()
    assert library_path(ISA, tmp_path / "cache", fractions.append) == path
    assert (compiler_calls(), fractions) == (3, [])
    assert {entry.name for entry in path.parent.iterdir()} == {path.name, path.with_suffix(".lock").name}


def test_a_change_of_source_header_flags_or_instruction_set_builds_anew(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    paths = [library_path(ISA, cache, _silent), library_path("avx512", cache, _silent)]
    paths.append(library_path(ISA, cache, _silent, extra_flags=("-g",)))
    (sources / "value.h").write_text("#define VALUE 43\n")
    paths.append(library_path(ISA, cache, _silent))
    assert _answer(paths[-1]) == 43
    (sources / "other.cpp").write_text("int other() { return 2; }\n")
    paths.append(library_path(ISA, cache, _silent))
    assert len(set(paths)) == 5


def test_the_owner_of_the_sources_compiles_for_all_users(
    sources: Path, tmp_path: Path, compiler_calls: Callable[[], int]
) -> None:
    built = library_path(ISA, tmp_path / "cache", _silent)
    num_calls = compiler_calls()
    found = library_path(ISA, tmp_path / "no-such-cache", _silent)
    assert found.parent == build.SHARED and found.stat().st_mode & 0o777 == 0o644
    assert found.read_bytes() == built.read_bytes() and compiler_calls() == num_calls
    (sources / "value.h").write_text("#define VALUE 43\n")
    assert _answer(library_path(ISA, tmp_path / "cache", _silent)) == 43
    assert len([*build.SHARED.iterdir()]) == 1, "the build of older sources is gone"


def test_extra_sources_are_compiled_into_a_library_of_their_own(sources: Path, tmp_path: Path) -> None:
    plain, extra = prebuild(ISA), tmp_path / "extra.cpp"
    for value in (1, 2):
        extra.write_text(TINY.replace("answer", "extra") % value)
        path = library_path(ISA, tmp_path / "cache", _silent, extra_sources=(extra,))
        assert (_answer(path), ctypes.CDLL(str(path)).extra()) == (42, value)
    assert not hasattr(ctypes.CDLL(str(plain)), "extra")


def test_another_version_of_the_compiler_builds_anew(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = set()
    for version in ("1", "2"):
        compiler = tmp_path / f"g++-{version}"
        compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\nexec g++ "$@"\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        paths.add(library_path(ISA, tmp_path / "cache", _silent))
    assert len(paths) == 2


def test_a_prebuilt_library_comes_first_and_needs_no_compiler(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuilt = prebuild(ISA)
    assert prebuilt.parent == tmp_path / "prebuilt"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library_path(ISA, tmp_path / "cache", _silent) == prebuilt
    assert not (tmp_path / "cache").exists()
    # One of other sources is not taken.
    (sources / "value.h").write_text("#define VALUE 44\n")
    with pytest.raises(BuildError, match="no-such-compiler"):
        library_path(ISA, tmp_path / "cache", _silent)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package of kernels, of version 1.2, without libraries."""
    folder = tmp_path / "site" / build.PACKAGE
    info = tmp_path / "site" / f"{build.PACKAGE}-1.2.dist-info"
    for one in (folder, info):
        one.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-kernels\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


def test_the_library_of_the_installed_kernels_is_loaded_if_its_sources_are_these(
    sources: Path, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = prebuild(ISA, package)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library_path(ISA, tmp_path / "cache", _silent) == made
    assert build.origin_of(ISA) == "of penstock-kernels 1.2"
    assert _answer(made) == 42
    # Tests compile more sources in.
    with pytest.raises(BuildError, match="no-such-compiler"):
        library_path(ISA, tmp_path / "cache", _silent, extra_flags=("-g",))


def test_the_library_of_installed_kernels_of_other_sources_is_never_loaded(
    sources: Path, package: Path, tmp_path: Path
) -> None:
    other = prebuild(ISA, package)
    (sources / "value.h").write_text("#define VALUE 44\n")
    path = library_path(ISA, tmp_path / "cache", _silent)
    assert path.parent == tmp_path / "cache" and path.name != other.name
    assert _answer(path) == 44
    assert build.origin_of(ISA).endswith("at the first start; penstock-kernels 1.2 has kernels of other sources")


def test_error_without_a_compiler_names_those_that_were_looked_for(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: looked for g\+\+, clang\+\+"):
        library_path(ISA, tmp_path / "cache", _silent)


def test_compilers_error_is_reported_and_no_library_is_left(sources: Path, tmp_path: Path) -> None:
    (sources / "other.cpp").write_text("this is no C++;\n")
    with pytest.raises(BuildError, match="this"):
        library_path(ISA, tmp_path / "cache", _silent)
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_compiler_that_cannot_be_started_is_a_build_error(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_bytes(b"\0not a program")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError, match="broken"):
        library_path(ISA, tmp_path / "cache", _silent)


BUILD_AT_ONCE = """
import pathlib, sys
from penstock.kernels.cpu import build
sources, cache = map(pathlib.Path, sys.argv[1:])
build.SOURCES, build.PREBUILT, build.SHARED = sources, cache / "none", cache.with_name("built")
print("ready", flush=True)
sys.stdin.read()
print(build.library_path("avx2", cache, lambda fraction: None))
"""


def test_of_processes_that_start_together_one_compiles(
    sources: Path, tmp_path: Path, compiler_calls: Callable[[], int]
) -> None:
    command = [sys.executable, "-c", BUILD_AT_ONCE, str(sources), str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    paths = set()
    for process in processes:
        with process:
            assert process.stdout is not None
            paths.add(Path(process.stdout.read().strip()))
        assert process.returncode == 0
    (path,) = paths
    assert _answer(path) == 42
    assert {entry.suffix for entry in path.parent.iterdir()} == {".so", ".lock"}
    assert compiler_calls() == len(list(sources.glob("*.cpp"))) + 1  # and the linker


SLOW_COMPILER = """#!/bin/sh
case "$*" in *--version*) echo one; exit 0;; esac
sleep 600 &
echo $! >> PIDS
wait
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_compilers_end_with_the_process_that_started_them(sources: Path, tmp_path: Path, number: int) -> None:
    compiler, pids = tmp_path / "slow", tmp_path / "pids"
    compiler.write_text(SLOW_COMPILER.replace("PIDS", str(pids)))
    compiler.chmod(0o755)
    command = [sys.executable, "-c", BUILD_AT_ONCE, str(sources), str(tmp_path / "cache")]
    env = os.environ | {"CXX": str(compiler)}
    with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        process.send_signal(number)
    grandchild = int(pids.read_text().split()[0])
    wait_until(
        lambda: not Path(f"/proc/{grandchild}").exists() or _state_of(grandchild) == "Z",
        what="the compiler outlives the process",
    )


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "Z"
