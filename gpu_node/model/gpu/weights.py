"""Load a decoder's weights onto a GPU, in the checkpoint's own format if a kernel supports it; or onto the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.checkpoint.block_repacking import BLOCK, block_kind, in_blocks
from penstock.gpu_node.model.checkpoint.scaled_matrix import ScaledTensor
from penstock.gpu_node.model.checkpoint.stored_kinds import Stored, StoredTensor
from penstock.gpu_node.model.checkpoint.stored_layer import StoredLinear
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors
from penstock.gpu_node.model.gpu.decoder import GpuWeights
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.linear import (
    SCALED,
    EmbeddingTable,
    Int4Linear,
    KeptLinear,
    PlainLinear,
    ScaledLinear,
    linear_of,
    pad_rows,
    padded_head,
)
from penstock.gpu_node.model.torch_common.layers import LayerWeights, Product
from penstock.gpu_node.model.torch_common.tensors import Convert, Converter, read_layer, read_norm
from penstock.kernels.triton.int4 import pair_scales

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
    vocab_rows: int | None = None,
) -> GpuWeights:
    """Read, fuse and convert a checkpoint layer by layer onto a device.

    linear: makes the layers' matrices; gather: collects the layers as they are read; head: makes the head of its weight
    in `dtype`, [vocab, hidden]. The embedding is always in `dtype`. vocab_rows: of embedding and head at each of
    several ranks, None for one rank. Raises ConfigError that names a missing tensor or one with another shape.
    """
    convert = Converter(dtype, device)
    embedding = convert.tensor(tensors.embedding())
    if spec.tied_head or vocab_rows is not None:
        # Both use the padded table; padding rows are no token's embedding.
        embedding = pad_rows(embedding, vocab_rows)
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
        head=head(embedding if spec.tied_head else pad_rows(convert.tensor(tensors.head()), vocab_rows)),
    )


_HALF_BLOCK = BLOCK // 2


class StoredLinearLoader:
    """Loads matrices in one format. `auto` keeps each stored format that has a kernel, else the decoder's dtype."""

    def __init__(self, quantization: str, device: Device, *, deterministic: bool = False) -> None:
        self._quantization = quantization
        self._deterministic = deterministic
        self._device = device
        self.formats: set[str] = set()
        """The formats in use, out of `none`, `int4`, `int8` and `fp8`."""

    def __call__(self, stored: StoredLinear, convert: Convert) -> KeptLinear:
        """Load a matrix, whose parts are concatenated by rows."""
        bias = convert(stored.biases) if stored.biases else None
        name = self._stored_format(stored.weights) if self._quantization == "auto" else None
        if name is None:
            name = "none" if self._quantization == "auto" else self._quantization
            kept = linear_of(name, deterministic=self._deterministic)(convert(stored.weights), bias)
        elif name == "int4":
            packed, scales, minima = (self._put(parts) for parts in zip(*map(_int4, stored.weights), strict=True))
            kept = Int4Linear(packed, pair_scales(scales, minima), bias)
        else:
            rows = (_scaled(part) for part in stored.weights if isinstance(part, ScaledTensor))
            numbers, scales = (self._put(parts) for parts in zip(*rows, strict=True))
            kept = ScaledLinear(numbers.view(SCALED[name]), scales, bias)
        if self._deterministic and name in ("int4", "fp8"):
            raise ConfigError(f"deterministic needs quantization none or int8; the checkpoint's matrices are {name}")
        self.formats.add(name)
        return kept

    def _stored_format(self, parts: tuple[Stored, ...]) -> str | None:
        """Return the common stored format of all parts if a kernel supports it, else None."""
        names = {_format_of(part) for part in parts}
        name = names.pop() if len(names) == 1 else None
        return None if name == "fp8" and not self._device.has_float8 else name

    def _put(self, parts: tuple[NDArray[np.generic], ...]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._device.torch)


def _format_of(part: Stored) -> str | None:
    if isinstance(part, ScaledTensor) and part.kind in SCALED:
        # The kernels support one scale per row and no zero points.
        return part.kind if part.group >= part.shape[1] and part.zeros is None else None
    is_cut = isinstance(part, StoredTensor) and not part.is_in_whole_blocks
    return "int4" if block_kind(part) in ("q4_0", "q4_1") and not is_cut else None


def _scaled(part: ScaledTensor) -> tuple[NDArray[np.generic], ...]:
    """Return the bytes of the numbers [rows, columns] and the scales [rows]."""
    return part.numbers.view(np.uint8), part.scales[:, 0]


def _int4(part: Stored) -> tuple[NDArray[np.generic], ...]:
    """Return nibbles [rows, columns / 2], scales and minima [rows, columns / 32] from GGUF's blocks."""
    tensor = in_blocks(part)
    data = tensor.data if tensor.row_order is None else tensor.data[tensor.row_order]
    blocks = data.reshape(len(data), tensor.shape[1] // BLOCK, -1)
    scales = blocks[..., :2].copy().view("<f2")[..., 0]
    minima = blocks[..., 2:4].copy().view("<f2")[..., 0] if tensor.kind == "q4_1" else scales * np.float16(-8)
    return blocks[..., -_HALF_BLOCK:].reshape(len(data), -1), scales, minima
