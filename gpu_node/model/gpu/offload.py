"""Layers whose matrices lie in host memory and come to the card one after another, each ahead of its products."""

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

_log = logging.getLogger(__name__)
_NUM_BUFFERS = 2
_ALIGNED = 256
_GIB = 1 << 30


class OffloadedLayers:
    """A decoder's layers, of which the fewest that cover a number of bytes lie in pinned memory, evenly over the depth.

    To go over the layers is to stream them. The k-th of those in pinned memory has its matrices in buffer k % 2 on the
    device, always: there they are from when the layer is yielded to when the next one is asked for, as work of the
    stream that is current then. What streams are told is the same each time, so that graphs may capture it, and it
    begins and ends within one pass.
    """

    def __init__(self, num_layers: int, offload_gib: float, device: Device, layers: Iterable[LayerWeights]) -> None:
        """device: one whose side stream is free; layers: there, each given up before the next one is taken.

        Raises ConfigError where the layers have less than `offload_gib` GiB of matrices, or so few would leave that the
        buffers take as much.
        """
        self._num_layers = num_layers
        self._offload_gib = offload_gib
        self._device = device
        self._buffers: list[Tensor] = []
        self._hosts: list[Tensor] = []
        self._offloaded: frozenset[int] = frozenset()
        self._layers = list(map(self._kept, range(num_layers), layers))
        count, mib = len(self._hosts), len(self._buffers[0]) / (1 << 20)
        facts = {"num_offloaded": count, "num_layers": num_layers}
        facts |= {"host_mib": round(mib * count), "freed_mib": round(mib * (count - _NUM_BUFFERS))}
        _log.info("layers are offloaded", extra=facts)

    def __iter__(self) -> Iterator[LayerWeights]:
        coming = map(self._fetch, range(len(self._hosts)))
        arrivals = deque(islice(coming, _NUM_BUFFERS))
        for i, layer in enumerate(self._layers):
            if i not in self._offloaded:
                yield layer
                continue
            arrivals.popleft().hold()
            yield layer
            arrivals.extend(islice(coming, 1))

    def _fetch(self, k: int) -> DeviceEvent:
        """Let the k-th layer's matrices come once what was asked for before is done; when they are there."""
        freed = self._device.mark()
        with self._device.on_side():
            freed.hold()
            buffer = self._buffers[k % _NUM_BUFFERS]
            buffer.copy_(self._hosts[k], non_blocking=True)
            return self._device.mark()

    def _kept(self, i: int, layer: LayerWeights) -> LayerWeights:
        if i == 0:
            size = _packed_bytes(layer)
            self._offloaded = frozenset(
                _spread(_num_covering(self._offload_gib, size, self._num_layers), self._num_layers)
            )
            self._buffers = [
                torch.zeros(size, dtype=torch.uint8, device=self._device.torch) for _ in range(_NUM_BUFFERS)
            ]
        return self._sent_away(layer) if i in self._offloaded else layer

    def _sent_away(self, layer: LayerWeights) -> LayerWeights:
        """The layer over a buffer, its matrices in pinned memory."""
        buffer = self._buffers[len(self._hosts) % _NUM_BUFFERS]
        if _packed_bytes(layer) > len(buffer):
            raise ConfigError("cpu_offload_gib wants layers of one size, and these are stored in formats of several")
        at = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal at
            place = buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            at += _aligned(tensor.nbytes)
            return place.copy_(tensor)

        packed = _mapped(layer, pack)
        self._hosts.append(self._device.pinned_run(len(buffer), dtype=torch.uint8).copy_(buffer))
        return packed


def _spread(count: int, num_layers: int) -> list[int]:
    """As far apart as can be; the last layer is one of them, so that little is left to compute when all have come."""
    return [(k + 1) * num_layers // count - 1 for k in range(count)]


def _num_covering(offload_gib: float, layer_bytes: int, num_layers: int) -> int:
    """The fewest layers whose matrices are so much."""
    count = -int(-offload_gib * _GIB // layer_bytes)
    if count > num_layers:
        most = num_layers * layer_bytes / _GIB
        raise ConfigError(f"cpu_offload_gib {offload_gib:g} is more than the layers' matrices, {most:.4g} GiB")
    if count <= _NUM_BUFFERS:
        least = _NUM_BUFFERS * layer_bytes / _GIB
        raise ConfigError(
            f"cpu_offload_gib {offload_gib:g} frees nothing: want more than {least:.4g}, which the card needs to stream"
        )
    return count


def _packed_bytes(layer: LayerWeights) -> int:
    """What the tensors of a layer's matrices take one behind another."""
    sizes: list[int] = []

    def measure(tensor: Tensor) -> Tensor:
        sizes.append(_aligned(tensor.nbytes))
        return tensor

    _mapped(layer, measure)
    return sum(sizes)


def _mapped(layer: LayerWeights, change: Callable[[Tensor], Tensor]) -> LayerWeights:
    """A layer whose matrices have other tensors, asked for in one order."""

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
    """Bytes in whole lines: kernels load what is aligned in one go."""
    return -(-size // _ALIGNED) * _ALIGNED
