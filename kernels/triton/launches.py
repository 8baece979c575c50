"""The tile, warps and stages of a kernel's launch: from a tuned table for the GPU if there is one, else by rule."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch
import triton


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


def attention_launch(kernel: str, head_dim: int, group: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """Return the fastest measured launch for such heads on this GPU, or an estimate if none was measured.

    kernel: `decode_attention` or `prefill_attention`; group: query heads per key head; dtype: of queries.
    """
    if device.type == "cuda":
        measured = _table(torch.cuda.get_device_name(device)).get(kernel, {}).get(shape_name(head_dim, group, dtype))
        if measured:
            return Launch(*measured)
    # Shared memory holds the keys and values of a tile for each stage but one. Ada has the least of it, 99 KiB.
    num_bytes = padded(head_dim, 16) * dtype.itemsize
    if kernel == "decode_attention":
        return Launch(min(64, (32 << 10) // num_bytes), 4, 3)
    return Launch(min(64, (16 << 10) // num_bytes), 4 if head_dim <= 64 else 8, 2 if num_bytes <= 512 else 1)


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
