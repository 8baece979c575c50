"""Offloaded layers: matrices in host memory that are streamed to the GPU one layer after another, ahead of use."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.gpu.device import Device, DeviceEvent
from penstock.gpu_node.model.gpu.linear import KeptLinear
from penstock.gpu_node.model.torch_common.layers import LayerWeights, Product

log = logging.getLogger(__package__)


_NUM_BUFFERS = 2
_ALIGNED = 256
_GIB = 1 << 30


class OffloadedLayers:
    """A decoder's layers, some of them offloaded to pinned host memory at even distances.

    The fewest layers that cover `offload_gib` are offloaded. Iterating over the layers streams them. The k-th offloaded
    layer always uses device buffer k % 2. Its matrices are valid, in the order of the current stream, from the time it
    is yielded until the next layer is requested. Each pass submits the same work to the streams and completes it, so
    that CUDA graphs can capture a pass.
    """

    def __init__(self, num_layers: int, offload_gib: float, device: Device, layers: Iterable[LayerWeights]) -> None:
        """device: one with an unused side stream; layers: on the device, each released before the next is read.

        Raises ConfigError if all layers have less than `offload_gib` GiB of matrices, or if the buffers would take as
        much memory as offloading frees.
        """
        self._num_layers = num_layers
        self._offload_gib = offload_gib
        self._device = device
        self._buffers: list[Tensor] = []
        self._host_copies: list[Tensor] = []
        self._offloaded: frozenset[int] = frozenset()
        self._layers = list(map(self._kept, range(num_layers), layers))
        count, mib = len(self._host_copies), len(self._buffers[0]) / (1 << 20)
        facts = {"num_offloaded": count, "num_layers": num_layers}
        facts |= {"host_mib": round(mib * count), "freed_mib": round(mib * (count - _NUM_BUFFERS))}
        log.info("layers are offloaded", extra=facts)

    def __iter__(self) -> Iterator[LayerWeights]:
        coming = map(self._fetch, range(len(self._host_copies)))
        arrivals = deque(islice(coming, _NUM_BUFFERS))
        for i, layer in enumerate(self._layers):
            if i not in self._offloaded:
                yield layer
                continue
            arrivals.popleft().hold()
            yield layer
            arrivals.extend(islice(coming, 1))

    def _fetch(self, k: int) -> DeviceEvent:
        """Start copying the k-th offloaded layer to its buffer after the work submitted so far.

        Returns the event that the copy is complete.
        """
        freed = self._device.record_event()
        with self._device.on_side():
            freed.hold()
            buffer = self._buffers[k % _NUM_BUFFERS]
            buffer.copy_(self._host_copies[k], non_blocking=True)
            return self._device.record_event()

    def _kept(self, i: int, layer: LayerWeights) -> LayerWeights:
        if i == 0:
            size = _packed_bytes(layer)
            count = _num_covering(self._offload_gib, size, self._num_layers)
            # Even distances, and the last layer is one of them: little computation remains after the last copy.
            self._offloaded = frozenset((k + 1) * self._num_layers // count - 1 for k in range(count))
            self._buffers = [
                torch.zeros(size, dtype=torch.uint8, device=self._device.torch) for _ in range(_NUM_BUFFERS)
            ]
        return self._moved_to_host(layer) if i in self._offloaded else layer

    def _moved_to_host(self, layer: LayerWeights) -> LayerWeights:
        """Move a layer's matrices to pinned memory and return the layer with its tensors in a device buffer."""
        buffer = self._buffers[len(self._host_copies) % _NUM_BUFFERS]
        if _packed_bytes(layer) > len(buffer):
            raise ConfigError("cpu_offload_gib needs layers of equal size, but this checkpoint mixes formats")
        at = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal at
            place = buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            at += _aligned(tensor.nbytes)
            return place.copy_(tensor)

        packed = _mapped(layer, pack)
        self._host_copies.append(self._device.pinned_run(len(buffer), dtype=torch.uint8).copy_(buffer))
        return packed


def _num_covering(offload_gib: float, layer_bytes: int, num_layers: int) -> int:
    """Return the fewest layers with at least `offload_gib` of matrices. Raises ConfigError for a useless number."""
    count = -int(-offload_gib * _GIB // layer_bytes)
    if count > num_layers:
        limit = num_layers * layer_bytes / _GIB
        raise ConfigError(f"cpu_offload_gib {offload_gib:g} is more than the layers' matrices, {limit:.4g} GiB")
    if count <= _NUM_BUFFERS:
        least = _NUM_BUFFERS * layer_bytes / _GIB
        raise ConfigError(
            f"cpu_offload_gib {offload_gib:g} frees nothing: it must exceed {least:.4g}, the size of the GPU buffers"
        )
    return count


def _packed_bytes(layer: LayerWeights) -> int:
    """Return the bytes of a layer's matrices, packed with alignment."""
    sizes: list[int] = []

    def measure(tensor: Tensor) -> Tensor:
        sizes.append(_aligned(tensor.nbytes))
        return tensor

    _mapped(layer, measure)
    return sum(sizes)


def _mapped(layer: LayerWeights, change: Callable[[Tensor], Tensor]) -> LayerWeights:
    """Return the layer with each tensor of its matrices replaced by `change`, which is called in a fixed order."""

    def product(product: Product) -> KeptLinear:
        kept: Any = product
        tensors = ((field.name, getattr(kept, field.name)) for field in fields(kept))
        changed: KeptLinear = replace(kept, **{name: change(tensor) for name, tensor in tensors if tensor is not None})
        return changed

    return replace(
        layer,
        qkv=product(layer.qkv),
        out=product(layer.out),
        mlp_in=product(layer.mlp_in),
        mlp_out=product(layer.mlp_out),
    )


def _aligned(size: int) -> int:
    """Round a size up to a multiple of 256 bytes, because kernels load aligned tensors faster."""
    return -(-size // _ALIGNED) * _ALIGNED
