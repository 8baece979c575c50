"""MXFP4 as gpt-oss stores its experts: numbers of four bits, and a power of two for each 32 columns.

`…_blocks` [experts, rows, columns / 32, 16] has columns 2 i and 2 i + 1 of a block in the low and the high half of byte
i. `…_scales` [experts, rows, columns / 32] has the exponents plus 127. GGUF's blocks have the same bits in another
order.
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.expert_stacks import ExpertRows, expert_rows
from penstock.gpu_node.model.checkpoint.methods.parts import Method
from penstock.gpu_node.model.checkpoint.stored_kinds import DerivedTensor, FindStored, ReadScaled, StoredTensor

_BLOCK = 32
_HALF = _BLOCK // 2
_BYTES = "u8"
_SCALE_DIMS = 3


def _reader_of(_settings: Mapping[str, Any]) -> ReadScaled:
    return _read


def _read(name: str, find: FindStored) -> DerivedTensor | None:
    place = expert_rows(name)
    blocks = None if place is None else find(f"{place.stack}_blocks")
    if place is None or blocks is None:
        return None
    scales = find(f"{place.stack}_scales")
    if scales is None:
        raise ConfigError(f"the checkpoint has no tensor {place.stack}_scales")
    return _expert(f"{name}.weight", place, blocks, scales)


def _expert(name: str, place: ExpertRows, blocks: StoredTensor, scales: StoredTensor) -> DerivedTensor:
    shape = scales.shape
    if blocks.kind != _BYTES or scales.kind != _BYTES or len(shape) != _SCALE_DIMS or blocks.shape != (*shape, _HALF):
        found = f"{blocks.kind} {list(blocks.shape)} and {scales.kind} {list(shape)}"
        needed = f"u8 [experts, rows, columns / {_BLOCK}, {_HALF}] and u8 [experts, rows, columns / {_BLOCK}]"
        raise ConfigError(f"tensors {place.stack}_blocks and _scales are {found}, but must be {needed}")
    experts, count, num_blocks = shape
    if place.expert >= experts:
        raise ConfigError(f"tensor {place.stack}_blocks has {experts} experts, but the config has more (num_experts)")
    first, rows = place.expert * count, place.of(count)
    make = _blocks_of(blocks.data.reshape(-1, num_blocks, _HALF), scales.data, first)
    return DerivedTensor(name, "mxfp4", (len(rows), num_blocks * _BLOCK), make, rows)


def _blocks_of(
    blocks: NDArray[np.uint8], scales: NDArray[np.uint8], first: int
) -> Callable[[NDArray[np.int32]], NDArray[np.uint8]]:
    """Return a function that makes GGUF's blocks of an expert's rows. first: the first of them in all rows."""

    def make(rows: NDArray[np.int32]) -> NDArray[np.uint8]:
        pairs = blocks[first + rows]
        # Codes 2 i and 2 i + 1 become the low or the high halves of bytes 2 i and 2 i + 1.
        made = np.empty((*pairs.shape[:2], 1 + _HALF), np.uint8)
        made[..., 0] = scales[first + rows]
        low, high = pairs[..., : _HALF // 2], pairs[..., _HALF // 2 :]
        made[..., 1::2] = low & 15 | high << 4
        made[..., 2::2] = low >> 4 | high & 240
        return made.reshape(len(rows), -1)

    return make


METHOD = Method("mxfp4", _reader_of)
