"""The engines that penstock is compared with, each in its own virtual environment under build/peers/, versions pinned.

`make bench-peers` (or `python -m bench.install NAME…`) installs the missing ones, then makes every engine's weights. A
second run does only what is still to do. When an engine fails to install, the command names it and goes on.
Where pip's index has no CPU builds of torch, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "build"
FOLDER = BUILD / "peers"
REQUIREMENTS = Path(__file__).parent / "requirements"
INSTALLED = "installed.txt"

LLAMA_BUILD = FOLDER / "src" / "llama-build"
LLAMA_TARGETS = ("llama", "llama-batched-bench", "llama-bench", "llama-perplexity", "llama-quantize", "llama-server")
LLAMA_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_TOOLS": "ON",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
AVX2 = "avx2"
FLOAT_BACKEND = FOLDER / "src" / "libggml-blas.so"
"""llama.cpp's backend for OpenBLAS: from 32 tokens on, it multiplies widened weights by activations in float32."""
UNUSED = {"vllm": ("torchvision", "torchaudio", "torchcodec"), "openvino-export": ("torchvision",)}
"""Installed only because they are required: a text model needs none, and their CUDA builds break a CPU torch."""
PEERS = ("llamacpp", "openvino", "openvino-export", "vllm", "queues")


def interpreter(peer: str) -> Path | None:
    """The Python of an installed peer."""
    return _python(peer) if (FOLDER / peer / INSTALLED).exists() else None


def llama_binary(name: str, isa: str = "") -> Path:
    """A program of the llama.cpp that the binding comes with. isa: compiled for `AVX2`, at the first call."""
    folder = LLAMA_BUILD if not isa else LLAMA_BUILD.with_name(f"{LLAMA_BUILD.name}-{isa}")
    if isa == AVX2 and not (folder / "bin" / name).exists():
        [vendor] = (FOLDER / "src").glob("llama_cpp_python-*/vendor/llama.cpp")
        known = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")
        flags = LLAMA_OPTIONS | {"GGML_NATIVE": "OFF"} | {f"GGML_{one}": "ON" for one in known}
        _run("cmake", "-S", vendor, "-B", folder, *(f"-D{option}={value}" for option, value in flags.items()))
        _run("cmake", "--build", folder, "--parallel", str(os.cpu_count()), "--target", name)
    return folder / "bin" / name


def llama_float_backend() -> Path:
    """Compile llama.cpp's backend for OpenBLAS at the first call. A program loads the file in GGML_BACKEND_PATH.

    Needs OpenBLAS with its headers (Debian: libopenblas-dev).
    """
    if not FLOAT_BACKEND.exists():
        [vendor] = (FOLDER / "src").glob("llama_cpp_python-*/vendor/llama.cpp")
        flags = ["-O2", "-std=c++17", "-fPIC", "-shared", "-DGGML_BLAS_USE_OPENBLAS"]
        flags += [
            f"-D{name}" for name in ("GGML_BACKEND_DL", "GGML_BACKEND_SHARED", "GGML_BACKEND_BUILD", "GGML_SHARED")
        ]
        flags += [f"-I{vendor / 'ggml' / folder}" for folder in ("include", "src")]
        flags += subprocess.run(
            ["pkg-config", "--cflags", "openblas"], check=True, capture_output=True, text=True
        ).stdout.split()
        libraries = [f"-L{LLAMA_BUILD / 'bin'}", "-lggml-base", "-lopenblas"]
        part = FLOAT_BACKEND.with_suffix(".part")
        _run("g++", *flags, vendor / "ggml" / "src" / "ggml-blas" / "ggml-blas.cpp", "-o", part, *libraries)
        part.rename(FLOAT_BACKEND)
    return FLOAT_BACKEND


def versions(peer: str) -> str:
    """What is installed for a peer: the pins of its requirements file."""
    lines = (REQUIREMENTS / f"{peer}.txt").read_text().splitlines()
    return ", ".join(line for line in lines if "==" in line and not line.startswith("#"))


def install(peer: str) -> None:
    """Makes the peer's environment unless its requirements are those that it was made from."""
    requirements = REQUIREMENTS / f"{peer}.txt"
    made_from = hashlib.sha256(requirements.read_bytes()).hexdigest()
    stamp = FOLDER / peer / INSTALLED
    if stamp.exists() and stamp.read_text() == made_from:
        return
    stamp.unlink(missing_ok=True)
    _run(sys.executable, "-m", "venv", FOLDER / peer)
    if peer == "llamacpp":
        _build_llama(requirements)
    _pip(peer, "install", "--requirement", requirements)
    if unused := UNUSED.get(peer):
        _pip(peer, "uninstall", "--yes", *unused)
    stamp.write_text(made_from)


def _build_llama(requirements: Path) -> None:
    """Compiles libllama once, for the binding and for the programs."""
    sources = FOLDER / "src"
    if not any(sources.glob("llama_cpp_python-*.tar.gz")):
        _pip("llamacpp", "download", "--no-deps", "--dest", sources, "--requirement", requirements)
    [archive] = sources.glob("llama_cpp_python-*.tar.gz")
    folder = sources / archive.name.removesuffix(".tar.gz")
    if not folder.exists():
        with tarfile.open(archive) as file:
            file.extractall(sources, filter="data")
    options = [f"-D{name}={value}" for name, value in LLAMA_OPTIONS.items()]
    _run("cmake", "-S", folder / "vendor" / "llama.cpp", "-B", LLAMA_BUILD, *options)
    _run("cmake", "--build", LLAMA_BUILD, "--parallel", str(os.cpu_count()), "--target", *LLAMA_TARGETS)


def _python(peer: str) -> Path:
    return FOLDER / peer / "bin" / "python"


def _pip(peer: str, *arguments: str | Path) -> None:
    # The library that the binding would build is there already; a wheel without it must not stay in pip's cache.
    env = {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF", "PIP_NO_CACHE_DIR": "1"}
    _run(_python(peer), "-m", "pip", *arguments, "--quiet", env=env)


def _run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    print(" ".join(map(str, command)), file=sys.stderr)
    subprocess.run(command, check=True, env=os.environ | (env or {}))
