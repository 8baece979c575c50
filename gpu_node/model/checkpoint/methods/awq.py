"""AWQ as AutoAWQ writes it for its gemm kernels (arXiv:2306.00978): 4-bit integers with zeros per group of inputs.

Matrices are stored transposed: `qweight` [inputs, outputs / 8], `qzeros` [groups, outputs / 8] and `scales`
[groups, outputs]. Each word holds outputs 0, 2, 4, 6, 1, 3, 5 and 7 of eight, lowest bits first.
https://github.com/casper-hansen/AutoAWQ
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.methods.parts import Method, Parts, unpacked
from penstock.gpu_node.model.checkpoint.scaled_matrix import ScaledTensor
from penstock.gpu_node.model.checkpoint.stored_kinds import FindStored, ReadScaled

_BITS = 4
_MIDDLE = 8
_WORD_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The position of each of eight outputs within a word."""


def _reader_of(settings: Mapping[str, Any]) -> ReadScaled:
    # AutoAWQ's own configs use w_bit and version; transformers' configs use bits and format.
    bits = settings.get("bits", settings.get("w_bit"))
    format_name = settings.get("version") or settings.get("format", "gemm")
    if bits != _BITS:
        raise ConfigError(f"awq of {bits} bits (bits or w_bit) is not supported; supported: {_BITS}")
    if format_name.lower() != "gemm":
        raise ConfigError(f"AWQ format {format_name!r} is not supported; supported: gemm")
    group_size = int(settings["group_size"] if "group_size" in settings else settings["q_group_size"])

    def read(name: str, find: FindStored) -> ScaledTensor | None:
        parts = Parts(name, find)
        return None if parts.find("qweight") is None else _read(parts, group_size)

    return read


def _read(parts: Parts, group_size: int) -> ScaledTensor:
    numbers, zeros = (_in_order(parts.integers(part)) - np.int8(_MIDDLE) for part in ("qweight", "qzeros"))
    scales = parts.floats("scales", len(zeros), numbers.shape[1])
    return ScaledTensor(
        name=parts.name,
        kind="int4",
        numbers=np.ascontiguousarray(numbers.T),
        scales=scales.T,
        zeros=zeros.T.astype(np.float32) if zeros.any() else None,
        group=group_size if group_size > 0 else len(numbers),
    )


def _in_order(words: NDArray[np.int32]) -> NDArray[np.int8]:
    eights = unpacked(words, _BITS).reshape(len(words), -1, len(_WORD_ORDER))
    return eights[..., _WORD_ORDER].reshape(len(words), -1).view(np.int8)


METHOD = Method("awq", _reader_of)
