"""compressed-tensors, which llm-compressor writes: float8, int8, NVFP4, or integers packed into 32-bit words.

`float-quantized` and `int-quantized` store an unpacked `weight`; `naive-quantized` stores either kind.
`pack-quantized` stores `weight_packed` [outputs, inputs / n] with an offset that makes numbers nonnegative,
`weight_shape`, zeros packed along the outputs, and with `actorder` the group of each input, `weight_g_idx`.
`nvfp4-pack-quantized` stores two numbers of four bits in a byte of `weight_packed`, a float8 `weight_scale` for each 16
columns, and `weight_global_scale`, by which these scales are divided.
`weight_scale` has one scale per matrix, per output, per group of inputs, or per block.
https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.methods.float4 import read_float4
from penstock.gpu_node.model.checkpoint.methods.parts import KINDS, Method, Parts, by_any_groups, read_float8, unpacked
from penstock.gpu_node.model.checkpoint.scaled_matrix import Floats, ScaledTensor
from penstock.gpu_node.model.checkpoint.stored_kinds import FindStored, ReadScaled

_FLOAT4 = "nvfp4-pack-quantized"
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", _FLOAT4)


def _reader_of(settings: Mapping[str, Any]) -> ReadScaled:
    format_name = settings["format"]
    if format_name not in _FORMATS:
        raise ConfigError(
            f"compressed-tensors format {format_name!r} is not supported; supported: {', '.join(_FORMATS)}"
        )
    sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise ConfigError(f"compressed-tensors with sparse format {sparse!r} is not supported; supported: dense")
    if settings.get("transform_config"):
        raise ConfigError("compressed-tensors with a transform_config is not supported")
    blocks = {
        tuple(group["weights"]["block_structure"])
        for group in settings.get("config_groups", {}).values()
        if (group.get("weights") or {}).get("strategy") == "block"
    }
    if len(blocks) > 1:
        raise ConfigError(f"compressed-tensors with blocks of several sizes is not supported: {sorted(blocks)}")
    block = next(iter(blocks), None)

    def read(name: str, find: FindStored) -> ScaledTensor | None:
        parts = Parts(name, find)
        if format_name == _FLOAT4:
            return read_float4(parts, "weight_packed", "weight_global_scale", is_divisor=True)
        return _read_packed(parts) or _read_int8(parts) or read_float8(parts, block)

    return read


def _read_packed(parts: Parts) -> ScaledTensor | None:
    if parts.find("weight_packed") is None:
        return None
    words, (rows, columns) = parts.integers("weight_packed"), _shape(parts)
    bits = next((bits for bits in KINDS if words.shape == (rows, -(-columns * bits // 32))), None)
    if bits is None:
        raise ConfigError(
            f"{parts.name} {[rows, columns]} in {list(words.shape)} words has neither 4 nor 8 bits per number"
        )
    middle = 1 << (bits - 1)
    scales, group = parts.scales("weight_scale", (rows, columns), None)
    zeros = None
    if parts.find("weight_zero_point") is not None:
        zeros = unpacked(parts.integers("weight_zero_point").T, bits).T[:rows].astype(np.float32) - middle
    numbers = (unpacked(words, bits)[:, :columns] - np.uint8(middle)).view(np.int8)
    tensor = ScaledTensor(parts.name, KINDS[bits], numbers, scales, _spread(zeros, scales), group)
    return tensor if parts.find("weight_g_idx") is None else by_any_groups(tensor, parts.integers("weight_g_idx"))


def _read_int8(parts: Parts) -> ScaledTensor | None:
    weight, zero_point = parts.find("weight"), parts.find("weight_zero_point")
    if weight is None or weight.kind != "i8":
        return None
    rows, columns = weight.shape
    scales, group = parts.scales("weight_scale", (rows, columns), None)
    zeros = None if zero_point is None else zero_point.data.view(np.int8).reshape(zero_point.shape).astype(np.float32)
    return ScaledTensor(parts.name, "int8", weight.data.view(np.int8), scales, _spread(zeros, scales), group)


def _spread(zeros: Floats | None, scales: Floats) -> Floats | None:
    """Broadcast zeros to the shape of the scales; None if all zeros are 0."""
    return None if zeros is None or not zeros.any() else np.broadcast_to(zeros, scales.shape)


def _shape(parts: Parts) -> tuple[int, int]:
    stored = parts.get("weight_shape")
    layout = {"i32": "<i4", "i64": "<i8"}.get(stored.kind)
    if layout is None or stored.shape != (2,):
        raise ConfigError(f"tensor {stored.name} is {stored.kind} {list(stored.shape)} but must be two integers")
    rows, columns = stored.data.view(layout).ravel().tolist()
    return rows, columns


METHOD = Method("compressed-tensors", _reader_of)
