"""The KV cache of a card: blocks of all layers' keys and values, on the device and behind those in pinned memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.gpu.device import Device, DeviceEvent
from penstock.kernels.paged_cache import QUANTISED_MAX, PagedCache
from penstock.kernels.triton.blocks import copy_blocks, independent_waves
from penstock.kernels.triton.sending import sent

_STAGED_BYTES = 64 << 20


class KvLayout:
    """Where things lie in a block: by layer keys, values, and their scales if they are quantised.

    A block is one run of memory, so that moving it between the tiers is one copy.
    """

    def __init__(self, spec: ModelSpec, block_size: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.num_layers = spec.num_layers
        self.shape = spec.num_kv_heads, block_size, spec.head_dim
        self.part_bytes = spec.num_kv_heads * block_size * spec.head_dim * dtype.itemsize
        self.scale_bytes = spec.num_kv_heads * block_size * 4 if dtype in QUANTISED_MAX else 0
        self.layer_bytes = 2 * (self.part_bytes + self.scale_bytes)

    @property
    def block_bytes(self) -> int:
        """Of all layers."""
        return self.num_layers * self.layer_bytes


class KvPool:
    """The blocks. 0 is the null block; those from `num_device_blocks + 1` on are the host's."""

    def __init__(self, layout: KvLayout, num_device_blocks: int, num_host_blocks: int, device: Device) -> None:
        self._layout = layout
        self._device = device
        self._host_from = num_device_blocks + 1
        block_bytes = layout.block_bytes
        self._near = torch.zeros(self._host_from, block_bytes, dtype=torch.uint8, device=device.torch)
        self._far = device.pinned_run(num_host_blocks, block_bytes, dtype=torch.uint8)
        self._jump = self._far.data_ptr() - self._near.data_ptr() - self._near.nbytes if num_host_blocks else 0
        num_staged = min(num_host_blocks, max(1, _STAGED_BYTES // block_bytes))
        self._staged = torch.empty(num_staged, block_bytes, dtype=torch.uint8, device=device.torch)
        self._leaving: DeviceEvent | None = None
        self.layers = [self._layer(layer) for layer in range(layout.num_layers)]

    def copy(self, copies: NDArray[np.int32]) -> None:
        """Copy blocks in order. What goes to the host leaves by a stream of its own, while the step computes."""
        for wave in independent_waves(copies):
            leaves = (wave[:, 0] < self._host_from) & (wave[:, 1] >= self._host_from)
            if not leaves.all():
                staying = wave[~leaves]
                if (staying >= self._host_from).any():
                    self.settle()
                copy_blocks(self._near, staying, host_from=self._host_from, host_jump=self._jump)
            leaving = wave[leaves]
            while len(leaving):
                self._send(leaving[: len(self._staged)])
                leaving = leaving[len(self._staged) :]

    def settle(self) -> None:
        """Let what follows see all that left for the host."""
        if self._leaving is not None:
            self._leaving.hold()
            self._leaving = None

    def has_host_block(self, tables: NDArray[np.int32]) -> bool:
        """Whether a step reads or fills blocks of the host."""
        return bool(len(self._far)) and bool((tables >= self._host_from).any())

    def zero(self, blocks: Sequence[int]) -> None:
        """Clear blocks."""
        self.settle()
        near = [block for block in blocks if block < self._host_from]
        self._near[near] = 0
        for block in blocks:
            if block >= self._host_from:
                self._far[block - self._host_from].copy_(torch.zeros_like(self._near[0]), non_blocking=True)

    def _send(self, copies: NDArray[np.int32]) -> None:
        """Copy device blocks to the host. They are staged first, because the step may fill them anew at once."""
        self.settle()
        sources = sent(copies[:, 0].astype(np.int64), self._device.torch)
        # By words: each number that is copied has its place worked out.
        near, there = self._near.view(torch.int32), self._staged[: len(copies)].view(torch.int32)
        torch.index_select(near, 0, sources, out=there)
        staged = self._device.mark()
        with self._device.on_side():
            staged.hold()
            for block, target in zip(self._staged, copies[:, 1].tolist(), strict=False):
                self._far[target - self._host_from].copy_(block, non_blocking=True)
            self._leaving = self._device.mark()

    def _layer(self, layer: int) -> PagedCache:
        layout, at = self._layout, layer * self._layout.layer_bytes
        heads, block_size, head_dim = layout.shape

        def view(dtype: torch.dtype, start: int, *inner: int) -> Tensor:
            """One kind of thing of all blocks, [heads, num_blocks, *inner], which begins at a byte of a block."""
            numbers = self._near.view(dtype)
            place = torch.empty(inner, device="meta")
            strides = place.numel(), numbers.shape[1], *place.stride()
            return numbers.as_strided((heads, len(numbers), *inner), strides, start // dtype.itemsize)

        k, v = (view(layout.dtype, start, block_size, head_dim) for start in (at, at + layout.part_bytes))
        k_scales = v_scales = None
        if layout.scale_bytes:
            first = at + 2 * layout.part_bytes
            k_scales = view(torch.float32, first, block_size)
            v_scales = view(torch.float32, first + layout.scale_bytes, block_size)
        return PagedCache(k, v, k_scales, v_scales, self._host_from, self._jump)
