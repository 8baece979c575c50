"""A decoder's weights for the torch runner, read when they are first needed, used in their files where they can be."""

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
    """Layers, each read when it is first asked for, and kept."""

    def __init__(self, num_layers: int, read: Callable[[int], LayerWeights]) -> None:
        self._num_layers = num_layers
        self._read = cache(read)

    def __iter__(self) -> Iterator[LayerWeights]:
        return map(self._read, range(self._num_layers))


def map_weights(
    tensors: DecoderTensors, spec: ModelSpec, dtype: torch.dtype, progress: Callable[[float], None], *, is_lazy: bool
) -> DecoderWeights:
    """All of a checkpoint found, and the head of it read; the pages that were copied are let go of.

    Embeddings are read row by row where they are stored, for each step's tokens. With `is_lazy` layers are read as the
    first step comes to them; quantised checkpoints cannot, since to find their tensors is to read them.
    Raises ConfigError naming a tensor that is missing or of another shape.
    """
    convert = Converter(dtype)
    # First, while there is nothing yet beside it: for a moment it may be there twice.
    head = Linear(convert.tensor(tensors.head()))
    tensors.release()
    found = _found(tensors, spec, progress)

    def read(stored: StoredLayer) -> LayerWeights:
        layer = read_layer(stored, convert, spec.norm_eps, packed_or_mapped)
        tensors.release()
        _trim()
        return layer

    layers: Iterable[LayerWeights]
    if is_lazy:
        stored = tuple(found)
        layers = LayersAsNeeded(spec.num_layers, lambda i: read(stored[i]))
    else:
        layers = tuple(map(read, found))
    final_norm = read_norm(tensors.final_norm(), convert, spec.norm_eps)
    return DecoderWeights(_rows_of(tensors.embedding(), convert), layers, final_norm, head)


def packed_or_mapped(stored: StoredLinear, convert: Converter) -> Product:
    """A matrix packed, or else its parts where they are stored, or else those in one."""
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
    """Let the system have the gaps that copies on the way left between matrices: a tenth of SmolLM2's weights."""
    # Only glibc has it.
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _rows_of(table: Stored, convert: Converter) -> Callable[[Tensor], Tensor]:
    def rows(ids: Tensor) -> Tensor:
        return convert.tensor(table.take_rows(ids.numpy(), len(ids), table.shape[1]))

    return rows
