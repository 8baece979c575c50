"""The GPUs of this machine, without importing torch: which there are, what they can run, and how busy one is."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError

_TIMEOUT_S = 20
_FIELDS = "name,driver_version,compute_cap,memory.free,memory.total"
MIN_COMPUTE_CAPABILITY = 8.0
"""A copy of the GPU runner's constant, which cannot be imported without torch."""
FLOAT8_COMPUTE_CAPABILITY = 8.9
ON_CPU = "models run on the CPU"


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
    versions = version_of("torch"), _torch_cuda(), version_of("triton")
    return GpuMachine(gpus, cuda[1] if cuda else None, *versions)


def gpu_problems(machine: GpuMachine) -> Iterator[tuple[str, str]]:
    """Yield each thing without which models run on the CPU, and its remedy. There is a GPU."""
    capability = machine.gpus[0].compute_capability
    if capability < MIN_COMPUTE_CAPABILITY:
        finding = f"compute capability {capability} is below {MIN_COMPUTE_CAPABILITY}: {ON_CPU}"
        yield finding, "use a GPU of the Ampere generation or later"
    if machine.torch_cuda is None:
        version = "is not installed" if machine.torch is None else f"{machine.torch} cannot use a GPU"
        yield f"torch {version}: {ON_CPU}", "pip install --force-reinstall torch (the build at PyPI has CUDA)"
    elif machine.driver_cuda is not None and _major(machine.torch_cuda) > _major(machine.driver_cuda):
        finding = (
            f"torch {machine.torch} needs CUDA {machine.torch_cuda}, the driver has {machine.driver_cuda}: {ON_CPU}"
        )
        yield finding, "update the driver, or install a torch for an older CUDA"
    if machine.triton is None:
        finding = "triton is not installed: a node with a GPU cannot start"
        yield finding, "pip install triton, which CUDA builds of torch bring"


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


def version_of(package: str) -> str | None:
    """Return a package's installed version; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- devices: the GPUs and MIG instances that CUDA gives a process


VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPU_LINE = re.compile(r"GPU (\d+): (.+) \(UUID: (GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"\s+MIG (\S+) +Device +\d+: \(UUID: (MIG-[^)]+)\)")
_MIG_GB = re.compile(r"\.(\d+)gb")
_NONE = ("", "-1", "none", "void", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES with which a process sees no GPU."""


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """A GPU, or a MIG instance of one."""

    token: str
    """What CUDA_VISIBLE_DEVICES calls it: a number, a UUID, or the name of a MIG instance."""
    name: str
    total_mib: int
    """Its memory; 0: unknown."""


def visible_devices(listing: str, sizes_mib: Sequence[int], variable: str | None) -> tuple[GpuDevice, ...]:
    """Return the devices that a process may use, in its order.

    `listing`: what `nvidia-smi -L` prints; `sizes_mib`: the memory of each GPU in that order; `variable`: the value of
    CUDA_VISIBLE_DEVICES, None: it is not set. Without it, each GPU is a device, or each of its MIG instances. Raises
    ConfigError for a device that the variable names and that is not there, which CUDA would silently leave out.
    """
    gpus, instances = _listed(listing, sizes_mib)
    if variable is None:
        return tuple(one for gpu in gpus for one in (instances[gpu.token] or [gpu]))
    if variable.strip() in _NONE:
        return ()
    found = [_named(token.strip(), gpus, instances) for token in variable.split(",")]
    if len({one.token for one in found}) < len(found):
        raise ConfigError(f"{VISIBLE} is {variable!r}, which names a GPU twice", param=VISIBLE)
    return tuple(found)


def devices_here() -> tuple[GpuDevice, ...]:
    """Return the devices of this machine that this process may use. Raises ConfigError as `visible_devices` does."""
    sizes = _smi("--query-gpu=memory.total", "--format=csv,noheader,nounits").split()
    sizes_mib = [int(size) if size.isdecimal() else 0 for size in sizes]
    return visible_devices(_smi("-L"), sizes_mib, os.environ.get(VISIBLE))


def _listed(listing: str, sizes_mib: Sequence[int]) -> tuple[list[GpuDevice], dict[str, list[GpuDevice]]]:
    """Return the GPUs in their order, and the MIG instances of each one by its UUID."""
    gpus: list[GpuDevice] = []
    instances: dict[str, list[GpuDevice]] = {}
    for line in listing.splitlines():
        if gpu := _GPU_LINE.fullmatch(line.rstrip()):
            size = sizes_mib[len(gpus)] if len(gpus) < len(sizes_mib) else 0
            gpus.append(GpuDevice(gpu[3], gpu[2], size))
            instances[gpu[3]] = []
        elif gpus and (mig := _MIG_LINE.fullmatch(line.rstrip())):
            gib = _MIG_GB.search(mig[1])
            name = f"{gpus[-1].name} MIG {mig[1]}"
            instances[gpus[-1].token].append(GpuDevice(mig[2], name, 1024 * int(gib[1]) if gib else 0))
    return gpus, instances


def _named(token: str, gpus: Sequence[GpuDevice], instances: Mapping[str, Sequence[GpuDevice]]) -> GpuDevice:
    """Return the device that CUDA means by a token: a number, or the beginning of a UUID that only one has."""
    if token.isdecimal() and int(token) < len(gpus):
        return replace(gpus[int(token)], token=token)
    every = [*gpus, *(one for some in instances.values() for one in some)]
    found = [one for one in every if one.token.startswith(token)] if token.startswith(("GPU-", "MIG-")) else []
    if len(found) == 1:
        return replace(found[0], token=token)
    if token.startswith("MIG-GPU-"):
        # The older names of MIG instances: MIG-GPU-<UUID of the GPU>/<GPU instance>/<compute instance>.
        owner = next((gpu for gpu in gpus if token.startswith(f"MIG-{gpu.token}/")), None)
        if owner is not None:
            return GpuDevice(token, f"{owner.name} MIG", 0)
    there = f"the GPUs 0 to {len(gpus) - 1}" if gpus else "no GPU"
    raise ConfigError(f"{VISIBLE} names {token!r}, but this machine has {there} (nvidia-smi -L)", param=VISIBLE)


log = logging.getLogger(__package__)


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """The load of one GPU, by all processes."""

    utilization: float
    """Share of the driver's last sample period in which a kernel ran on the GPU."""
    memory_used_bytes: int
    memory_total_bytes: int


class GpuDriver:
    """Reads the load of one GPU. A read takes about a millisecond; safe on any thread.

    The package nvidia-ml-py (extra `gpu`) is imported at the first read, and only on a node with a GPU.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gpu: Any = None
        self._is_opened = False

    def read(self, uuid: str) -> GpuLoad | None:
        """Return the load of the GPU with this UUID; None for an empty UUID, and while the driver fails."""
        if not uuid:
            return None
        if not self._is_opened:
            self._is_opened = True
            self._open(uuid)
        if self._gpu is None:
            return None
        try:
            rates = self._nvml.nvmlDeviceGetUtilizationRates(self._gpu)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._gpu)
        except self._nvml.NVMLError as error:
            log.debug("the GPU's driver does not answer", extra={"reason": str(error)})
            return None
        return GpuLoad(rates.gpu / 100, memory.used, memory.total)

    def _open(self, uuid: str) -> None:
        try:
            import pynvml
        except ModuleNotFoundError:
            log.info("the load of the GPU is unknown", extra={"reason": "pip install 'penstock-llm[gpu]'"})
            return
        try:
            pynvml.nvmlInit()
            self._gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            log.warning("the load of the GPU is unknown", extra={"gpu": uuid, "reason": str(error)})
        self._nvml = pynvml
