"""Load a decoder's weights for the torch runner: lazily, and mapped from the checkpoint's files where possible."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.checkpoint.files import Stored
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors, StoredLayer, StoredLinear
from penstock.gpu_node.model.torch_common.layers import DecoderWeights, LayerWeights, Product
from penstock.gpu_node.model.torch_common.tensors import Converter, read_layer, read_norm
from penstock.gpu_node.model.torch_cpu.linear import FusedLinear, Linear, can_prepack


class LayersAsNeeded:
    """A decoder's layers; each one is read on its first use and then kept."""

    def __init__(self, num_layers: int, read: Callable[[int], LayerWeights]) -> None:
        self._num_layers = num_layers
        self._read = cache(read)

    def __iter__(self) -> Iterator[LayerWeights]:
        return map(self._read, range(self._num_layers))


def map_weights(
    tensors: DecoderTensors, spec: ModelSpec, dtype: torch.dtype, progress: Callable[[float], None], *, is_lazy: bool
) -> DecoderWeights:
    """Find all tensors of a checkpoint, read the head, and release the file pages that were copied.

    Each step reads only the embedding rows of its tokens. With `is_lazy`, the first step reads the layers. That is not
    possible for quantized checkpoints, because finding their tensors reads them. Raises ConfigError that names a
    missing tensor or one with another shape.
    """
    convert = Converter(dtype)
    # The head comes first, while memory is free: packing may need two copies of it for a moment.
    head = Linear(convert.tensor(tensors.head()))
    tensors.release()
    found = _found(tensors, spec, progress)

    def read(stored: StoredLayer) -> LayerWeights:
        layer = read_layer(stored, convert, spec.norm_eps, packed_or_mapped, spec.norm_offset)
        tensors.release()
        _trim()
        return layer

    layers: Iterable[LayerWeights]
    if is_lazy:
        stored = tuple(found)
        layers = LayersAsNeeded(spec.num_layers, lambda i: read(stored[i]))
    else:
        layers = tuple(map(read, found))
    final_norm = read_norm(tensors.final_norm(), convert, spec.norm_eps, spec.norm_offset)
    return DecoderWeights(_rows_of(tensors.embedding(), convert), layers, final_norm, head)


def packed_or_mapped(stored: StoredLinear, convert: Converter) -> Product:
    """Return a matrix: its mapped parts if they are all mapped and packing is not possible, else one fused copy."""
    if can_prepack(convert.dtype) or not all(map(convert.is_mapped, stored.weights)):
        return Linear(convert(stored.weights), convert(stored.biases) if stored.biases else None)
    biases: Iterable[Tensor | None] = (
        map(convert.tensor, stored.biases) if stored.biases else [None] * len(stored.weights)
    )
    parts = tuple(Linear(convert.tensor(weight), bias) for weight, bias in zip(stored.weights, biases, strict=True))
    return parts[0] if len(parts) == 1 else FusedLinear(parts)


def _found(tensors: DecoderTensors, spec: ModelSpec, progress: Callable[[float], None]) -> Iterator[StoredLayer]:
    for layer in range(spec.num_layers):
        yield tensors.layer(layer)
        progress((layer + 1) / spec.num_layers)


def _trim() -> None:
    """Return freed memory between matrices to the system: a tenth of SmolLM2's weights."""
    # Only glibc has malloc_trim.
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _rows_of(table: Stored, convert: Converter) -> Callable[[Tensor], Tensor]:
    def rows(ids: Tensor) -> Tensor:
        return convert.tensor(table.take_rows(ids.numpy(), len(ids), table.shape[1]))

    return rows
