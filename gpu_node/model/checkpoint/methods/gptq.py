"""GPTQ as AutoGPTQ and GPTQModel write it (arXiv:2210.17323): integers of 4 or 8 bits, zeros for groups of inputs.

A matrix is kept by inputs: `qweight` [inputs / n, outputs] with n numbers of a column in each word, `qzeros`
[groups, outputs / n], `scales` [groups, outputs] and `g_idx`, the group of each input: with `desc_act` any.
The format `gptq` keeps words of zeros less a word of ones, `gptq_v2` as they are.
https://github.com/AutoGPTQ/AutoGPTQ, https://github.com/ModelCloud/GPTQModel
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.files import FindStored, ReadScaled
from penstock.gpu_node.model.checkpoint.methods.parts import KINDS, Method, Parts, by_any_groups, unpacked
from penstock.gpu_node.model.checkpoint.scaled_matrix import ScaledTensor

_ONE_LESS = {"gptq": True, "gptq_v2": False}
_ONES = {4: 0x11111111, 8: 0x01010101}
"""A one for each number of a word."""


def _reader_of(settings: Mapping[str, Any]) -> ReadScaled:
    bits, form = settings["bits"], settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if bits not in KINDS:
        raise ConfigError(f"gptq of {bits} bits is not read; read: 4, 8")
    if form not in _ONE_LESS:
        raise ConfigError(f"gptq in the format {form} is not read; read: {', '.join(_ONE_LESS)}")
    group_size = int(settings["group_size"])
    if settings.get("dynamic"):
        raise ConfigError("gptq with settings of single modules (dynamic) is not read")

    missing = _ONES[bits] if _ONE_LESS[form] else 0

    def read(name: str, find: FindStored) -> ScaledTensor | None:
        parts = Parts(name, find)
        return None if parts.find("qweight") is None else _read(parts, bits, group_size, missing)

    return read


def _read(parts: Parts, bits: int, group_size: int, missing: int) -> ScaledTensor:
    numbers = unpacked(parts.integers("qweight").T, bits)
    # Whole words are one less in each number, and borrow where one was 0: added as words, they wrap back.
    packed_zeros = unpacked(parts.integers("qzeros") + np.int32(missing), bits)
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
