"""How kernels are launched: tile, warps and stages, by a tuned table for the GPU or by rule; and dependent launches.

With programmatic dependent launch, programs of a kernel may start while the kernel ahead of them still runs. Usually a
GPU starts a kernel only after the one ahead has ended and its results are in memory. With dependent launches, programs
are placed on multiprocessors as soon as all programs of the kernel ahead have begun, and wait there. CUDA graphs record
this as programmatic edges.

A wait covers only the kernel directly ahead. The end of that kernel implies the end of all kernels before it, because
each of its own programs waited too. So every program of every such kernel must wait before all else, also one that ends
at once because its row is padding. Without the wait it could end before the kernel ahead of it. The kernel behind would
then read results that are not there yet, or write to memory that is still read.

Kernels of libraries may run between such kernels: each waits for the kernel ahead, by its launch or by itself.

No kernel of a step writes weights, so products of one row load their first weights before they wait: memory would be
idle while a small kernel ahead ends. Nothing else may be read there. On an H100, a step of Llama-3.1-8B with one
sequence is 4 % faster by it. It was 7 % slower when all products fetched weights to the L2 cache. It was also slower
with the signal before the wait: programs that wait take the place of those that work.

Source: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, `griddepcontrol`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tiles(NamedTuple):
    """How a product is tiled, as its kernel and Triton name the options."""

    ROWS: int
    OUTPUTS: int
    COLUMNS: int
    num_warps: int
    num_stages: int


MANY_OUTPUTS = 8192
"""A matrix with so many rows has a tile of 64 of them for each multiprocessor."""


class Launch(NamedTuple):
    """How the work of a kernel is tiled and scheduled."""

    tile: int
    """Tokens, rows or columns that a program processes at once; the kernel defines which of these."""
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def attention_launch(
    kernel: str, head_dim: int, group: int, dtype: torch.dtype, device: torch.device, rows: int = 64
) -> Launch:
    """Return the fastest measured launch for such heads on this GPU, or an estimate if none was measured.

    kernel: `decode_attention` or `prefill_attention`; group: query heads per key head; dtype: of queries; rows:
    queries of a tile of `prefill_attention`, whose tables for 128 of them are named `prefill_attention_128`.
    """
    if device.type == "cuda":
        table = _table(torch.cuda.get_device_name(device)).get(kernel if rows == 64 else f"{kernel}_{rows}", {})
        if measured := table.get(shape_name(head_dim, group, dtype)):
            return Launch(*measured)
    num_bytes = padded(head_dim, 16) * dtype.itemsize
    if kernel == "decode_attention":
        return Launch(min(64, (32 << 10) // num_bytes), 4, 3)
    if dtype.itemsize > 2:
        return Launch(min(64, (16 << 10) // num_bytes), 4 if head_dim <= 64 else 8, 2 if num_bytes <= 512 else 1)
    return _prefill_launch(num_bytes, rows, architecture(device))


def _prefill_launch(num_bytes: int, rows: int, capability: int) -> Launch:
    """Return the launch for `rows` queries per tile, with the most stages that shared memory holds.

    num_bytes: of one head's vector. A warp multiplies 16 rows, so each warp has its own; of vectors above 512 bytes two
    warps share rows, because one's registers do not hold the sums. With three stages, the block table of a tile arrives
    while the keys and values of the tile before it do.
    """
    tile = max(16, min(64, (16 << 10 if is_left_shared(capability) else 8 << 10) // num_bytes))
    # The queries, and two buffers of keys and of values.
    kib = (rows + 2 * 2 * tile) * num_bytes / 1024
    warps = rows // 16 * (2 if num_bytes > 512 else 1)
    return Launch(tile, warps, 3 if kib <= shared_memory_kib(capability) else 1)


def prefill_rows(head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the queries per tile of prefill attention: 128 where registers and shared memory hold them, else 64."""
    num_bytes, capability = padded(head_dim, 16) * dtype.itemsize, architecture(device)
    widest = 512 if is_left_shared(capability) else 256
    fits = num_bytes <= widest and _prefill_launch(num_bytes, 128, capability).num_stages > 1
    return 128 if dtype.itemsize == 2 and fits else 64


def architecture(device: torch.device) -> int:
    """Return the GPU's compute capability, ten times the major number plus the minor; 86 on the CPU."""
    if device.type != "cuda":
        return 86
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def is_left_shared(capability: int) -> bool:
    """Return whether products read their left matrix from shared memory.

    Before Hopper, and on consumer GPUs, it is in registers, which leaves fewer of them for everything else.
    """
    return 90 <= capability < 120


def shared_memory_kib(capability: int) -> int:
    """Return the largest shared memory of one program (CUDA C++ Programming Guide, technical specifications)."""
    if 80 <= capability < 90:
        return 163 if capability in (80, 87) else 99
    return 227 if 90 <= capability < 120 else 99


def shape_name(head_dim: int, group: int, dtype: torch.dtype) -> str:
    """Return the key of a head shape in a tuned table."""
    return f"{head_dim},{group},{str(dtype).removeprefix('torch.')}"


def num_multiprocessors(device: torch.device) -> int:
    """Return the GPU's multiprocessors; 1 on the CPU, where programs run one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def padded(size: int, least: int = 1) -> int:
    """Round up to a power of two, as the sides of Triton's blocks must be."""
    return max(least, int(triton.next_power_of_2(size)))


def table_name(gpu_name: str) -> str:
    """Return the file in `tuned/` with a GPU's launches: kernel → shape → tile, warps, stages."""
    return "-".join(gpu_name.lower().split()) + ".json"


@cache
def _table(gpu_name: str) -> dict[str, dict[str, list[int]]]:
    path = files(__package__).joinpath("tuned", table_name(gpu_name))
    if not path.is_file():
        return {}
    table: dict[str, dict[str, list[int]]] = json.loads(path.read_text())
    return table


_FIRST_CAPABILITY = 90
_is_enabled = ContextVar("dependent launches", default=False)


@triton.jit
def wait_for_kernel_ahead(DEPENDENT: tl.constexpr):
    """Wait for the kernel ahead, then let the programs of the kernel behind start; the first line of each kernel."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@contextmanager
def dependent_launches(*, enabled: bool = True) -> Iterator[None]:
    """Launch the kernels of the enclosed code as dependents, on GPUs that support it; this thread's kernels only.

    A context, because it is a property of how a step is captured. Products, adapters and attention backends, which
    launch the kernels, would only hand it on.
    """
    token = _is_enabled.set(enabled)
    try:
        yield
    finally:
        _is_enabled.reset(token)


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return the constant DEPENDENT and the launch option of a kernel that begins with `wait_for_kernel_ahead`."""
    if not _is_enabled.get() or triton.knobs.runtime.interpret or architecture(device) < _FIRST_CAPABILITY:
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}
