"""The KV cache of the GPU runner: blocks in device memory, and swapped-out blocks in pinned host memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.gpu.device import Device, DeviceEvent
from penstock.kernels.arguments import QUANTIZED_MAX, PagedCache
from penstock.kernels.triton.copies import copy_blocks, independent_waves, to_device_async

_STAGED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What a layer keeps of a block: its keys, its values, and their scales if they are quantized."""

    num_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def part_bytes(self) -> int:
        """Bytes of the keys, and of the values."""
        return self.num_heads * self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of the keys' scales, and of the values'."""
        return self.num_heads * self.block_size * 4 if self.dtype in QUANTIZED_MAX else 0

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return 2 * (self.part_bytes + self.scale_bytes)


class KvLayout:
    """The layout of a block, which has a `LayerLayout` for each layer with attention.

    A block is contiguous, so that swapping it in or out takes one copy. With `by_layer`, the blocks of each layer
    follow one another instead: attention reads within fewer pages of memory, and swapping takes a copy for each layer.
    Which layout is faster is not measured on a GPU yet; `bench_gpu` compares both.
    """

    def __init__(self, spec: ModelSpec, block_size: int, dtype: torch.dtype, *, by_layer: bool = False) -> None:
        self.dtype = dtype
        self.by_layer = by_layer
        self.layers = tuple(
            LayerLayout(layer.attention.num_kv_heads, block_size, layer.attention.head_dim, dtype)
            for layer in spec.layers
            if layer.attention is not None
        )
        if by_layer and len(set(self.layers)) > 1:
            raise ConfigError("a KV cache by layer needs layers with equal heads")
        self.starts = tuple(accumulate((layer.num_bytes for layer in self.layers), initial=0))
        """Where each layer begins in a block, then the end of the block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.starts[-1]

    def num_staged(self, num_host_blocks: int) -> int:
        """Return the number of blocks in device memory that swapping out copies through."""
        return min(num_host_blocks, max(1, _STAGED_BYTES // self.block_bytes))

    @property
    def num_runs(self) -> int:
        """Number of parts that all blocks are cut into; the same part of all blocks is contiguous."""
        return len(self.layers) if self.by_layer else 1


class KvPool:
    """The KV blocks. Block 0 is the null block; blocks from `num_device_blocks + 1` on are in host memory."""

    def __init__(self, layout: KvLayout, num_device_blocks: int, num_host_blocks: int, device: Device) -> None:
        self._layout = layout
        self._device = device
        self._host_from = num_device_blocks + 1
        num_runs = layout.num_runs
        run_bytes = layout.block_bytes // num_runs
        # [runs, blocks, bytes]
        self._device_blocks = torch.zeros(num_runs, self._host_from, run_bytes, dtype=torch.uint8, device=device.torch)
        self._host_blocks = device.pinned_run(num_runs, num_host_blocks, run_bytes, dtype=torch.uint8)
        if num_host_blocks:
            device.check_host_address(self._host_blocks)
        num_staged = layout.num_staged(num_host_blocks)
        self._staged = torch.empty(num_runs, num_staged, run_bytes, dtype=torch.uint8, device=device.torch)
        self._copied_out: DeviceEvent | None = None
        self.layers = [self._layer(layer) for layer in range(len(layout.layers))]

    def copy(self, copies: NDArray[np.int32]) -> None:
        """Copy blocks in order. Copies from device to host run on the side stream while the step computes."""
        for wave in independent_waves(copies):
            is_swap_out = (wave[:, 0] < self._host_from) & (wave[:, 1] >= self._host_from)
            if not is_swap_out.all():
                others = wave[~is_swap_out]
                if (others >= self._host_from).any():
                    self.wait_for_swap_out()
                for run, blocks in enumerate(self._device_blocks):
                    copy_blocks(blocks, others, host_from=self._host_from, host_jump=self._host_jump(run))
            swapped_out, most = wave[is_swap_out], self._staged.shape[1]
            while len(swapped_out):
                self._swap_out(swapped_out[:most])
                swapped_out = swapped_out[most:]

    def wait_for_swap_out(self) -> None:
        """Make the current stream wait for all copies to the host."""
        if self._copied_out is not None:
            self._copied_out.hold()
            self._copied_out = None

    def has_host_block(self, tables: NDArray[np.int32]) -> bool:
        """Return whether a step with these block tables reads or writes host blocks."""
        return bool(self._host_blocks.shape[1]) and bool((tables >= self._host_from).any())

    def _host_jump(self, run: int) -> int:
        """Return how far a run's host blocks are from the addresses behind its device blocks."""
        if not self._host_blocks.shape[1]:
            return 0
        on_device = self._device_blocks[run]
        return self._host_blocks[run].data_ptr() - on_device.data_ptr() - on_device.nbytes

    def _swap_out(self, copies: NDArray[np.int32]) -> None:
        """Copy device blocks to the host through a staging buffer, because the step may overwrite them at once."""
        self.wait_for_swap_out()
        sources = to_device_async(copies[:, 0].astype(np.int64), self._device.torch)
        # As int32: index_select computes an address per element, so larger elements are faster.
        for blocks, staged_blocks in zip(self._device_blocks, self._staged, strict=True):
            there = staged_blocks[: len(copies)].view(torch.int32)
            torch.index_select(blocks.view(torch.int32), 0, sources, out=there)
        staged = self._device.record_event()
        with self._device.on_side():
            staged.hold()
            for staged_blocks, on_host in zip(self._staged, self._host_blocks, strict=True):
                for block, target in zip(staged_blocks, copies[:, 1].tolist(), strict=False):
                    on_host[target - self._host_from].copy_(block, non_blocking=True)
            self._copied_out = self._device.record_event()

    def _layer(self, layer: int) -> PagedCache:
        layout, own = self._layout, self._layout.layers[layer]
        run, at = (layer, 0) if layout.by_layer else (0, layout.starts[layer])
        heads, block_size, head_dim = own.num_heads, own.block_size, own.head_dim

        def view(dtype: torch.dtype, start: int, *inner: int) -> Tensor:
            """View one array of all blocks as [heads, num_blocks, *inner]; it starts at byte `start` of a block."""
            numbers = self._device_blocks[run].view(dtype)
            place = torch.empty(inner, device="meta")
            strides = place.numel(), numbers.shape[1], *place.stride()
            first = numbers.storage_offset() + start // dtype.itemsize
            return numbers.as_strided((heads, len(numbers), *inner), strides, first)

        k, v = (view(layout.dtype, start, block_size, head_dim) for start in (at, at + own.part_bytes))
        k_scales = v_scales = None
        if own.scale_bytes:
            first = at + 2 * own.part_bytes
            k_scales = view(torch.float32, first, block_size)
            v_scales = view(torch.float32, first + own.scale_bytes, block_size)
        return PagedCache(k, v, k_scales, v_scales, self._host_from, self._host_jump(run))
