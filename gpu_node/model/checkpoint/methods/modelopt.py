"""Checkpoints of NVIDIA's ModelOpt: NVFP4, or float8 with one scale for each matrix.

`weight` holds float8, or two numbers of four bits in a byte. Of NVFP4, `weight_scale` has a scale for each 16 columns,
and `weight_scale_2` what all of them are multiplied by. `input_scale` is not used. https://github.com/NVIDIA/Model-Optimizer
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.methods.float4 import GROUP, read_float4
from penstock.gpu_node.model.checkpoint.methods.parts import Method, Parts, read_float8
from penstock.gpu_node.model.checkpoint.scaled_matrix import ScaledTensor
from penstock.gpu_node.model.checkpoint.stored_kinds import FindStored, ReadScaled

_ALGORITHMS = ("NVFP4", "FP8")


def _reader_of(settings: Mapping[str, Any]) -> ReadScaled:
    settings = settings.get("quantization") or settings
    algorithm = settings["quant_algo"]
    if algorithm not in _ALGORITHMS:
        supported = ", ".join(_ALGORITHMS)
        raise ConfigError(f"modelopt with quant_algo {algorithm!r} is not supported; supported: {supported}")
    if algorithm == "NVFP4" and (group := settings.get("group_size") or GROUP) != GROUP:
        raise ConfigError(f"modelopt NVFP4 with group_size {group} is not supported; supported: {GROUP}")

    def read(name: str, find: FindStored) -> ScaledTensor | None:
        parts = Parts(name, find)
        return read_float4(parts, "weight", "weight_scale_2", is_divisor=False) or read_float8(parts, None)

    return read


METHOD = Method("modelopt", _reader_of)
