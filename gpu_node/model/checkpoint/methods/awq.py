"""AWQ as AutoAWQ writes it for its gemm kernels (arXiv:2306.00978): integers of 4 bits, zeros for groups of inputs.

A matrix is kept by inputs: `qweight` [inputs, outputs / 8] and `qzeros` [groups, outputs / 8], whose words hold outputs
0, 2, 4, 6, 1, 3, 5 and 7 of eight, lowest bits first; `scales` [groups, outputs]. https://github.com/casper-hansen/AutoAWQ
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.files import FindStored, ReadScaled
from penstock.gpu_node.model.checkpoint.methods.parts import Method, Parts, unpacked
from penstock.gpu_node.model.checkpoint.scaled_matrix import ScaledTensor

_BITS = 4
_MIDDLE = 8
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word each of eight outputs is."""


def _reader_of(settings: Mapping[str, Any]) -> ReadScaled:
    # Older configs call them w_bit and version, transformers' bits and format.
    bits, form = settings.get("bits", settings.get("w_bit")), settings.get("version") or settings.get("format", "gemm")
    if bits != _BITS:
        raise ConfigError(f"awq of {bits} bits is not read; read: {_BITS}")
    if form.lower() != "gemm":
        raise ConfigError(f"awq in the format {form} is not read; read: gemm")
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
    eights = unpacked(words, _BITS).reshape(len(words), -1, len(_PLACES))
    return eights[..., _PLACES].reshape(len(words), -1).view(np.int8)


METHOD = Method("awq", _reader_of)
