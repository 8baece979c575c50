"""Repack quantized matrices of other formats into GGUF's blocks of 32 columns, which all runners support."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.checkpoint.scaled_matrix import Floats, ScaledTensor
from penstock.gpu_node.model.checkpoint.stored_kinds import DerivedTensor, Stored, StoredTensor

BLOCK = 32


def block_kind(tensor: Stored) -> str:
    """Return the kind of `in_blocks(tensor)` if a tensor is stored in, or fits into, GGUF blocks; else its own kind."""
    if isinstance(tensor, StoredTensor | DerivedTensor) or tensor.kind == "fp8":
        return tensor.kind
    if tensor.shape[1] % BLOCK or (tensor.group % BLOCK and tensor.group < tensor.shape[1]):
        return tensor.kind
    if tensor.kind == "int8":
        return "q8_0" if tensor.zeros is None else tensor.kind
    return "q4_0" if tensor.zeros is None else "q4_1"


def in_blocks(tensor: Stored) -> StoredTensor:
    """Return a scaled tensor in GGUF blocks with float16 scales, or in float32 if it does not fit into blocks.

    A tensor that is not scaled is returned unchanged, or as it is derived.
    """
    if isinstance(tensor, StoredTensor):
        return tensor
    if isinstance(tensor, DerivedTensor):
        return tensor.made()
    kind = block_kind(tensor)
    if kind in _BLOCKS:
        return StoredTensor(tensor.name, kind, tensor.shape, _BLOCKS[kind](tensor))
    return StoredTensor(tensor.name, "float32", tensor.shape, tensor.to_float32().view(np.uint8))


def _q4_0(tensor: ScaledTensor) -> NDArray[np.uint8]:
    return _joined(_halves(tensor, tensor.scales), _nibbles(tensor))


def _q4_1(tensor: ScaledTensor) -> NDArray[np.uint8]:
    zeros = np.zeros_like(tensor.scales) if tensor.zeros is None else tensor.zeros
    # A nibble of 0 encodes -8.
    minima = -tensor.scales * (zeros + 8)
    return _joined(_halves(tensor, tensor.scales), _halves(tensor, minima), _nibbles(tensor))


def _q8_0(tensor: ScaledTensor) -> NDArray[np.uint8]:
    numbers = np.ascontiguousarray(tensor.numbers).reshape(len(tensor.numbers), -1, BLOCK)
    return _joined(_halves(tensor, tensor.scales), numbers.view(np.uint8))


_BLOCKS = {"q4_0": _q4_0, "q4_1": _q4_1, "q8_0": _q8_0}


def _halves(tensor: ScaledTensor, by_group: Floats) -> NDArray[np.uint8]:
    """Spread per-group numbers to blocks, as the bytes of float16, [rows, blocks, 2]."""
    num_blocks = tensor.shape[1] // BLOCK
    # A checkpoint may state a group that is larger than the matrix.
    repeats = min(-(-tensor.group // BLOCK), num_blocks)
    by_block = np.repeat(by_group.astype("<f2"), repeats, axis=1)[:, :num_blocks]
    return np.ascontiguousarray(by_block)[..., None].view(np.uint8)


def _nibbles(tensor: ScaledTensor) -> NDArray[np.uint8]:
    """Pack columns i and i + 16 of each block into one byte, [rows, blocks, 16]."""
    nibbles = (tensor.numbers + 8).astype(np.uint8).reshape(len(tensor.numbers), -1, BLOCK)
    return nibbles[..., : BLOCK // 2] | nibbles[..., BLOCK // 2 :] * np.uint8(16)


def _joined(*parts: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.concatenate(parts, axis=-1).reshape(len(parts[0]), -1)
