"""Load a decoder's weights onto a GPU, in the checkpoint's own format if a kernel supports it; or onto the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.checkpoint.block_repacking import BLOCK, block_kind, in_blocks
from penstock.gpu_node.model.checkpoint.scaled_matrix import ScaledTensor
from penstock.gpu_node.model.checkpoint.stored_kinds import Stored, StoredTensor
from penstock.gpu_node.model.checkpoint.stored_layer import StoredLayer, StoredLinear
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors
from penstock.gpu_node.model.gpu.decoder import GpuWeights
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.expert_weights import MatrixLoader, mxfp4_experts, read_experts, stacked
from penstock.gpu_node.model.gpu.experts import GpuExperts
from penstock.gpu_node.model.gpu.linear import (
    SCALED,
    BlockLinear,
    EmbeddingTable,
    Int4Linear,
    KeptLinear,
    ScaledLinear,
    linear_of,
    pad_rows,
    padded_head,
)
from penstock.gpu_node.model.torch_common.layers import LayerWeights, Norm, Product
from penstock.gpu_node.model.torch_common.tensors import Convert, Converter, read_layer, read_norm
from penstock.kernels.triton.blocks import BLOCK_COLUMNS
from penstock.kernels.triton.experts import ExpertMatrices
from penstock.kernels.triton.int4 import pair_scales


def load_weights(
    tensors: DecoderTensors,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: Callable[[float], None],
    device: torch.device,
    linear: MatrixLoader | None = None,
    gather: Callable[[Iterator[LayerWeights]], Iterable[LayerWeights]] = tuple,
    head: Callable[[Tensor], Product] = padded_head,
    vocab_rows: int | None = None,
) -> GpuWeights:
    """Read, fuse and convert a checkpoint layer by layer onto a device.

    linear: makes the layers' matrices, None: in `dtype`; gather: collects the layers as they are read; head: makes the
    head of its weight in `dtype`, [vocab, hidden]. The embedding is always in `dtype`. vocab_rows: of embedding and
    head at each of several ranks, None for one rank. Raises ConfigError that names a missing tensor or one with another
    shape.
    """
    convert, load = Converter(dtype, device), linear or StoredLinearLoader("none", Device(device))
    embedding = convert.tensor(tensors.embedding())
    if spec.tied_head or vocab_rows is not None:
        # Both use the padded table; padding rows are no token's embedding.
        embedding = pad_rows(embedding, vocab_rows)
    tensors.release()

    experts: list[GpuExperts | None] = []
    positions = tensors.position_embedding()

    def layers() -> Iterator[LayerWeights]:
        for at, layer in enumerate(spec.layers):
            stored, own = tensors.layer(at), None
            routed = next((mlp for mlp in layer.mlps if mlp.experts is not None), None)
            if routed is not None:
                own = read_experts(stored, routed, convert, load, device, spec.norm_eps)
                stored = _without_experts(stored)
            experts.append(own)
            yield _with_factor(read_layer(stored, convert, spec.norm_eps, load, spec.norm_offset))
            tensors.release()
            progress((at + 1) / spec.num_layers)

    return GpuWeights(
        embedding=EmbeddingTable(embedding),
        layers=gather(layers()),
        experts=experts,
        positions=None if positions is None else convert.tensor(positions),
        final_norm=read_norm(tensors.final_norm(), convert, spec.norm_eps, spec.norm_offset),
        head=head(embedding if spec.tied_head else pad_rows(convert.tensor(tensors.head()), vocab_rows)),
    )


def _without_experts(stored: StoredLayer) -> StoredLayer:
    left = replace(stored, router=None, routing=None)
    if stored.mixture is None:
        return replace(left, experts=())
    return replace(left, mixture=replace(stored.mixture, experts=()))


def _with_factor(layer: LayerWeights) -> LayerWeights:
    """Multiply what a layer adds last by the factor of its output. The decoder multiplies the rest."""
    if (factor := layer.output_scale) is None or (norm := layer.post_mlp_norm) is None:
        return layer
    return replace(layer, post_mlp_norm=Norm((norm.weight.float() + norm.offset) * factor, None, norm.eps))


_HALF_BLOCK = BLOCK // 2


class StoredLinearLoader:
    """Loads matrices in one format. `auto` keeps each stored format that has a kernel, else the decoder's dtype."""

    def __init__(
        self, quantization: str, device: Device, *, deterministic: bool = False, keeps_blocks: bool = False
    ) -> None:
        """keeps_blocks: whether `auto` keeps float8 with blocks of 128, whose kernel never ran on a GPU."""
        self._quantization = quantization
        self.deterministic = deterministic
        self._device = device
        self._keeps_blocks = keeps_blocks and device.has_float8
        self.formats: set[str] = set()
        """The formats in use, out of `none`, `int4`, `int8`, `fp8`, `fp8_blocks` and `mxfp4`."""

    def __call__(self, stored: StoredLinear, convert: Convert) -> KeptLinear:
        """Load a matrix, whose parts are concatenated by rows."""
        name = self._stored_format(stored.weights) if self._quantization == "auto" else None
        return self._loaded(stored, convert, name)

    def experts(self, matrices: Sequence[StoredLinear], convert: Convert) -> ExpertMatrices:
        """Load a matrix of each expert as one tensor; in the decoder's dtype where they are stored differently."""
        if self._quantization == "auto" and all(map(is_mxfp4, matrices)):
            self.formats.add("mxfp4")
            biases = [convert(one.biases) for one in matrices if one.biases]
            return mxfp4_experts(matrices, torch.stack(biases) if biases else None, self._device.torch)
        names = {self._stored_format(one.weights) if self._quantization == "auto" else None for one in matrices}
        name = names.pop() if len(names) == 1 else None
        return stacked([self._loaded(one, convert, name) for one in matrices])

    def _loaded(self, stored: StoredLinear, convert: Convert, name: str | None) -> KeptLinear:
        """Load a matrix in the format that it is stored in, or None: in the one that was asked for."""
        bias = convert(stored.biases) if stored.biases else None
        kept: KeptLinear
        if name is None:
            name = "none" if self._quantization == "auto" else self._quantization
            kept = linear_of(name, deterministic=self.deterministic)(convert(stored.weights), bias)
        elif name == "int4":
            packed, scales, minima = (self._put(parts) for parts in zip(*map(_int4, stored.weights), strict=True))
            kept = Int4Linear(packed, pair_scales(scales, minima), bias)
        else:
            rows = (_scaled(part) for part in stored.weights if isinstance(part, ScaledTensor))
            numbers, scales = (self._put(parts) for parts in zip(*rows, strict=True))
            if name == "fp8_blocks":
                kept = BlockLinear(numbers.view(torch.float8_e4m3fn), scales.T.contiguous(), bias)
            else:
                kept = ScaledLinear(numbers.view(SCALED[name]), scales[:, 0].contiguous(), bias)
        if self.deterministic and name in ("int4", "fp8", "fp8_blocks"):
            raise ConfigError(f"deterministic needs quantization none or int8; the checkpoint's matrices are {name}")
        self.formats.add(name)
        return kept

    def _stored_format(self, parts: tuple[Stored, ...]) -> str | None:
        """Return the common stored format of all parts if a kernel supports it, else None."""
        names = {format_of(part) for part in parts}
        name = names.pop() if len(names) == 1 else None
        is_missing = (name == "fp8" and not self._device.has_float8) or (
            name == "fp8_blocks" and not self._keeps_blocks
        )
        return None if is_missing else name

    def _put(self, parts: tuple[NDArray[np.generic], ...]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._device.torch)


def format_of(part: Stored) -> str | None:
    """Return the format in which a GPU can keep a stored matrix; None if it has none."""
    if isinstance(part, ScaledTensor) and part.kind in SCALED:
        if part.zeros is not None:
            return None
        # The kernels support one scale per row, or for each 128 columns of float8.
        if part.group < part.shape[1]:
            return "fp8_blocks" if part.kind == "fp8" and part.group == BLOCK_COLUMNS else None
        return part.kind
    is_cut = isinstance(part, StoredTensor) and not part.is_in_whole_blocks
    return "int4" if block_kind(part) in ("q4_0", "q4_1") and not is_cut else None


def is_mxfp4(matrix: StoredLinear) -> bool:
    """Return whether all of a matrix is stored as MXFP4, in whole blocks."""
    return all(
        part.kind == "mxfp4" and part.shape[1] % BLOCK == 0 and not (isinstance(part, StoredTensor) and part.skipped)
        for part in matrix.weights
    )


def _scaled(part: ScaledTensor) -> tuple[NDArray[np.generic], ...]:
    """Return the bytes of the numbers [rows, columns] and the scales [rows, groups]."""
    return part.numbers.view(np.uint8), part.scales


def _int4(part: Stored) -> tuple[NDArray[np.generic], ...]:
    """Return nibbles [rows, columns / 2], scales and minima [rows, columns / 32] from GGUF's blocks."""
    tensor = in_blocks(part)
    data = tensor.data if tensor.row_order is None else tensor.data[tensor.row_order]
    blocks = data.reshape(len(data), tensor.shape[1] // BLOCK, -1)
    scales = blocks[..., :2].copy().view("<f2")[..., 0]
    minima = blocks[..., 2:4].copy().view("<f2")[..., 0] if tensor.kind == "q4_1" else scales * np.float16(-8)
    return blocks[..., -_HALF_BLOCK:].reshape(len(data), -1), scales, minima
