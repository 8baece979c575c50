"""Load a decoder's weights onto a GPU, or onto the CPU as its stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors, StoredLinear
from penstock.gpu_node.model.gpu.decoder import GpuWeights
from penstock.gpu_node.model.gpu.linear import EmbeddingTable, PlainLinear, pad_rows, padded_head
from penstock.gpu_node.model.torch_common.layers import LayerWeights, Product
from penstock.gpu_node.model.torch_common.tensors import Convert, Converter, read_layer, read_norm

MakeLinear: TypeAlias = Callable[[StoredLinear, Convert], Product]
"""Makes a product of a stored matrix, which it may keep as stored or convert."""


def plain_linear(stored: StoredLinear, convert: Convert) -> PlainLinear:
    """Load a matrix in the decoder's dtype."""
    return PlainLinear(convert(stored.weights), convert(stored.biases) if stored.biases else None)


def load_weights(
    tensors: DecoderTensors,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: Callable[[float], None],
    device: torch.device,
    linear: MakeLinear = plain_linear,
    gather: Callable[[Iterator[LayerWeights]], Iterable[LayerWeights]] = tuple,
    head: Callable[[Tensor], Product] = padded_head,
) -> GpuWeights:
    """Read, fuse and convert a checkpoint layer by layer onto a device.

    linear: makes the layers' matrices; gather: collects the layers as they are read; head: makes the head of its weight
    in `dtype`, [vocab, hidden]. The embedding is always in `dtype`. Raises ConfigError that names a missing tensor or
    one with another shape.
    """
    convert = Converter(dtype, device)
    embedding = convert.tensor(tensors.embedding())
    if spec.tied_head:
        # Both use the padded table; padding rows are no token's embedding.
        embedding = pad_rows(embedding)
    tensors.release()

    def layers() -> Iterator[LayerWeights]:
        for layer in range(spec.num_layers):
            yield read_layer(tensors.layer(layer), convert, spec.norm_eps, linear, spec.norm_offset)
            tensors.release()
            progress((layer + 1) / spec.num_layers)

    return GpuWeights(
        embedding=EmbeddingTable(embedding),
        layers=gather(layers()),
        final_norm=read_norm(tensors.final_norm(), convert, spec.norm_eps, spec.norm_offset),
        head=head(embedding if spec.tied_head else convert.tensor(tensors.head())),
    )
