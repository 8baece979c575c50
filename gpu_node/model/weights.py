"""A checkpoint to the torch tensors a decoder multiplies with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_node.model.checkpoint import Stored, StoredTensor
from penstock.gpu_node.model.layers import DecoderWeights, LayerWeights, Product
from penstock.gpu_node.model.linear import Linear
from penstock.gpu_node.model.norm import Norm
from penstock.gpu_node.model.spec import ModelSpec
from penstock.gpu_node.model.tensors import DecoderTensors, StoredLinear, StoredNorm

Convert: TypeAlias = Callable[[tuple[Stored, ...]], Tensor]
"""Stored tensors as one, their rows one after another."""
MakeLinear: TypeAlias = Callable[[StoredLinear, Convert], Product]
"""Keeps a matrix as it likes: as it is stored, or as what converting it gives."""

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def plain_linear(stored: StoredLinear, convert: Convert) -> Product:
    """A matrix in the decoder's dtype."""
    return Linear(convert(stored.weights), convert(stored.biases) if stored.biases else None)


def load_weights(
    tensors: DecoderTensors,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: Callable[[float], None],
    device: torch.device | None = None,
    linear: MakeLinear = plain_linear,
    gather: Callable[[Iterator[LayerWeights]], Iterable[LayerWeights]] = tuple,
) -> DecoderWeights:
    """Read, fuse and convert a checkpoint layer by layer, onto the CPU where no device is named.

    `linear` keeps the layers' matrices; embedding and head stay as they are. `gather` gets each layer as it is read.
    Raises ConfigError naming a tensor that is missing or of another shape.
    """
    convert = _Converter(dtype, spec.norm_eps, device, linear)
    embedding = convert.tensor(tensors.embedding())
    tensors.release()

    def layers() -> Iterator[LayerWeights]:
        for layer in range(spec.num_layers):
            yield _load_layer(tensors, convert, layer)
            tensors.release()
            progress((layer + 1) / spec.num_layers)

    return DecoderWeights(
        embedding=embedding,
        layers=gather(layers()),
        final_norm=convert.norm(tensors.final_norm()),
        head=Linear(embedding if spec.tied_head else convert.tensor(tensors.head())),
    )


def _load_layer(tensors: DecoderTensors, convert: _Converter, layer: int) -> LayerWeights:
    mlp_norm, head_norms = tensors.mlp_norm(layer), tensors.head_norms(layer)
    attention_norm = convert.norm(tensors.attention_norm(layer))
    return LayerWeights(
        attention_norm=attention_norm,
        qkv=convert.linear(tensors.qkv(layer)),
        head_norms=None if head_norms is None else (convert.head_norm(head_norms[0]), convert.head_norm(head_norms[1])),
        out=convert.linear(tensors.out(layer)),
        mlp_norm=attention_norm if mlp_norm is None else convert.norm(mlp_norm),
        mlp_in=convert.linear(tensors.mlp_in(layer)),
        mlp_out=convert.linear(tensors.mlp_out(layer)),
    )


class _Converter:
    """Stored tensors to torch's, in one dtype."""

    def __init__(
        self, dtype: torch.dtype, norm_eps: float, device: torch.device | None, make_linear: MakeLinear
    ) -> None:
        self._dtype = dtype
        self._norm_eps = norm_eps
        self._device = device
        self._make_linear = make_linear

    def tensor(self, stored: Stored) -> Tensor:
        kind = _FLOATS.get(stored.kind)
        if kind is None or not isinstance(stored, StoredTensor) or stored.row_order is not None:
            return torch.from_numpy(stored.to_float32()).to(self._device, self._dtype)
        return torch.from_numpy(stored.data.copy()).view(kind).reshape(stored.shape).to(self._device, self._dtype)

    def rows(self, parts: tuple[Stored, ...]) -> Tensor:
        """The parts' rows one after the other, copied once where they can be."""
        plain = [part for part in parts if isinstance(part, StoredTensor) and part.row_order is None]
        kinds = {part.kind for part in parts}
        kind = _FLOATS.get(kinds.pop())
        if kinds or kind is None or len(plain) < len(parts) or len(parts[0].shape) == 1:
            return torch.cat([self.tensor(part) for part in parts])
        data = torch.from_numpy(np.concatenate([part.data for part in plain]))
        return data.view(kind).to(self._device, self._dtype)

    def linear(self, stored: StoredLinear) -> Product:
        return self._make_linear(stored, self.rows)

    def norm(self, stored: StoredNorm) -> Norm:
        bias = None if stored.bias is None else self.tensor(stored.bias)
        return Norm(self.tensor(stored.weight), bias, self._norm_eps)

    def head_norm(self, weight: Stored) -> Norm:
        return Norm(self.tensor(weight), None, self._norm_eps)
