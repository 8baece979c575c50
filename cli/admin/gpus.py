"""The GPUs of a machine, and what would compute on them."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from penstock.cli.admin.check import Check

_TIMEOUT_S = 20
_FIELDS = "name,driver_version,compute_cap,memory.free,memory.total"
MIN_COMPUTE_CAPABILITY = 8.0
"""A copy of the GPU runner's constant, which cannot be imported without torch."""
FLOAT8_COMPUTE_CAPABILITY = 8.9
_CPU = "models run on the CPU"


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU as its driver reports it."""

    name: str
    driver: str
    compute_capability: float
    free_mib: int
    total_mib: int


@dataclass(frozen=True, slots=True)
class GpuMachine:
    """The GPUs and libraries that a node would find on this machine."""

    gpus: tuple[Gpu, ...]
    driver_cuda: str | None
    """The newest CUDA version that the driver supports; None: unknown."""
    torch: str | None
    """The installed version; None: none. Likewise `triton`."""
    torch_cuda: str | None
    """The CUDA version that torch was built for; None: torch cannot use a GPU."""
    triton: str | None


def this_machine() -> GpuMachine:
    """Ask the driver and look at the installed packages, without importing torch."""
    gpus = tuple(_gpus_in(_smi(f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")))
    # Only the table for people names the version of CUDA.
    cuda = re.search(r"CUDA Version: *([0-9.]+)", _smi()) if gpus else None
    versions = _version_of("torch"), _torch_cuda(), _version_of("triton")
    return GpuMachine(gpus, cuda[1] if cuda else None, *versions)


def judge_gpus(machine: GpuMachine) -> Iterator[Check]:
    """Yield each GPU's facts, then what is missing to use it, or what will compute on it."""
    if not machine.gpus:
        finding = f"none: nvidia-smi reports no GPU, or there is no driver; {_CPU}"
        yield Check("ok", "GPU", finding, "for a GPU: install its driver, then a CUDA build of torch and triton")
        return
    for gpu in machine.gpus:
        memory = f"{gpu.free_mib / 1024:.1f} of {gpu.total_mib / 1024:.1f} GiB free"
        driver = f"driver {gpu.driver} (CUDA {machine.driver_cuda or 'unknown'})"
        yield Check("ok", "GPU", f"{gpu.name}: {driver}, compute capability {gpu.compute_capability}, {memory}")
    if missing := list(_missing(machine)):
        yield from missing
        return
    first = machine.gpus[0]
    float8 = "fp8 too" if first.compute_capability >= FLOAT8_COMPUTE_CAPABILITY else "no fp8"
    dtypes = f"dtype: as the checkpoint (bfloat16, float16, float32); int8, int4, {float8}"
    packages = f"torch {machine.torch} for CUDA {machine.torch_cuda}, triton {machine.triton}"
    yield Check(
        "ok", "GPU", f"runner gpu (--device cuda) will compute; attention: Triton kernels; {dtypes}; {packages}"
    )


def _missing(machine: GpuMachine) -> Iterator[Check]:
    """Yield a warning for each thing without which models run on the CPU."""
    capability = machine.gpus[0].compute_capability
    if capability < MIN_COMPUTE_CAPABILITY:
        finding = f"compute capability {capability} is below {MIN_COMPUTE_CAPABILITY}: {_CPU}"
        yield Check("warn", "GPU", finding, "use a GPU of the Ampere generation or later")
    if machine.torch_cuda is None:
        version = "is not installed" if machine.torch is None else f"{machine.torch} cannot use a GPU"
        yield Check("warn", "GPU", f"torch {version}: {_CPU}", "install a CUDA build of torch")
    elif machine.driver_cuda is not None and _major(machine.torch_cuda) > _major(machine.driver_cuda):
        finding = f"torch {machine.torch} needs CUDA {machine.torch_cuda}, the driver has {machine.driver_cuda}: {_CPU}"
        yield Check("warn", "GPU", finding, "update the driver, or install a torch for an older CUDA")
    if machine.triton is None:
        finding = "triton is not installed: a node with a GPU cannot start"
        yield Check("warn", "GPU", finding, "install triton, which CUDA builds of torch bring")


def _gpus_in(report: str) -> Iterator[Gpu]:
    """Yield the GPUs of nvidia-smi's lines; a line with an unknown number, such as [N/A], is left out."""
    for line in report.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(_FIELDS.split(",")):
            name, driver, *numbers = fields
            try:
                capability, free, total = map(float, numbers)
            except ValueError:
                continue
            yield Gpu(name, driver, capability, int(free), int(total))


def _smi(*words: str) -> str:
    """Return what nvidia-smi prints; nothing without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _torch_cuda() -> str | None:
    """Read the CUDA version from torch's files: importing it takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda\b.*= *'([0-9.]+)'", path.read_text(), re.MULTILINE) if path.is_file() else None
    return found[1] if found else None


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
