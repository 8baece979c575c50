"""GPTQ as AutoGPTQ and GPTQModel write it (arXiv:2210.17323): 4-bit or 8-bit integers with zeros per group of inputs.

Matrices are stored transposed: `qweight` [inputs / n, outputs] with n numbers of a column per word, `qzeros`
[groups, outputs / n], `scales` [groups, outputs], and `g_idx`, the group of each input. With `desc_act`, the groups
are in any order. The format `gptq` stores zeros minus one, `gptq_v2` stores them unchanged.
https://github.com/AutoGPTQ/AutoGPTQ, https://github.com/ModelCloud/GPTQModel
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.methods.parts import KINDS, Method, Parts, by_any_groups, unpacked
from penstock.gpu_node.model.checkpoint.scaled_matrix import ScaledTensor
from penstock.gpu_node.model.checkpoint.stored_kinds import FindStored, ReadScaled

_HAS_ZEROS_MINUS_ONE = {"gptq": True, "gptq_v2": False}
_ONES = {4: 0x11111111, 8: 0x01010101}
"""A word that holds the number 1 in each of its fields, by bits per number."""


def _reader_of(settings: Mapping[str, Any]) -> ReadScaled:
    bits, format_name = settings["bits"], settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if bits not in KINDS:
        raise ConfigError(f"gptq of {bits} bits is not supported; supported: 4, 8")
    if format_name not in _HAS_ZEROS_MINUS_ONE:
        raise ConfigError(f"GPTQ format {format_name!r} is not supported; supported: {', '.join(_HAS_ZEROS_MINUS_ONE)}")
    group_size = int(settings["group_size"])
    if settings.get("dynamic"):
        raise ConfigError("gptq with settings for single modules (dynamic) is not supported")

    zeros_offset = _ONES[bits] if _HAS_ZEROS_MINUS_ONE[format_name] else 0

    def read(name: str, find: FindStored) -> ScaledTensor | None:
        parts = Parts(name, find)
        return None if parts.find("qweight") is None else _read(parts, bits, group_size, zeros_offset)

    return read


def _read(parts: Parts, bits: int, group_size: int, zeros_offset: int) -> ScaledTensor:
    numbers = unpacked(parts.integers("qweight").T, bits)
    # The writer subtracted 1 per number from whole words, with borrows; adding it back to whole words undoes them.
    packed_zeros = unpacked(parts.integers("qzeros") + np.int32(zeros_offset), bits)
    scales = parts.floats("scales", *packed_zeros.shape).T
    middle = 1 << (bits - 1)
    zeros = packed_zeros.T.astype(np.float32) - middle
    tensor = ScaledTensor(
        name=parts.name,
        kind=KINDS[bits],
        numbers=(numbers - np.uint8(middle)).view(np.int8),
        scales=scales,
        zeros=zeros if zeros.any() else None,
        group=group_size if group_size > 0 else numbers.shape[1],
    )
    return tensor if parts.find("g_idx") is None else by_any_groups(tensor, parts.integers("g_idx"))


METHOD = Method("gptq", _reader_of)
