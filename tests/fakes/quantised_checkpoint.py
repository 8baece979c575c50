"""Checkpoints in the layouts of quantisation methods, written from what their formats say, for any family's model."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed: TypeAlias = dict[str, Tensor]

TOKEN_IDS = random.Random(0).choices(range(384), k=100)
"""What tests have such models read."""


@dataclass(frozen=True)
class Layout:
    """How a matrix is quantised and kept."""

    settings: dict[str, Any]
    """What config.json says of it."""
    pack: Callable[[Tensor, Any], tuple[Packed, Tensor]]
    """The tensors of a matrix, [outputs, inputs], and what they mean in float32."""
    given: dict[str, Any] = field(default_factory=dict)
    """How."""


def write_quantised(folder: Path, layout: Layout, target: Path) -> dict[str, Tensor]:
    """Write `folder`'s model with its layers' matrices quantised to `target`; the matrices that they stand for."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    kept, meant = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim == 1 or "layers." not in name:
            kept[name] = tensor
            continue
        packed, meant[name] = layout.pack(tensor.float(), layout.given)
        kept |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in packed.items()}
    save_file(kept, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": layout.settings}))
    return meant


def words(numbers: NDArray[np.int64], bits: int) -> Tensor:
    """Numbers of `bits` in words, the first lowest, along the last axis."""
    per_word = 32 // bits
    grouped = numbers.reshape(*numbers.shape[:-1], -1, per_word)
    return torch.from_numpy((grouped << bits * np.arange(per_word)).sum(-1).astype(np.uint32).view(np.int32))


@dataclass(frozen=True)
class Integers:
    """numbers [outputs, inputs], scales and zeros [outputs, groups], and the group of each input."""

    numbers: NDArray[np.int64]
    scales: Tensor
    zeros: NDArray[np.int64]
    groups: NDArray[np.int64]

    @property
    def meant(self) -> Tensor:
        """In float32."""
        scales = self.scales.float().numpy()[:, self.groups]
        return torch.from_numpy(((self.numbers - self.zeros[:, self.groups]) * scales).astype(np.float32))


def _integers(weight: Tensor, bits: int, group: int, symmetric: bool, shuffled: bool, scale: torch.dtype) -> Integers:
    """Round to the nearest of 2 ** bits numbers, zeros anywhere among them."""
    (rows, columns), most = weight.shape, (1 << bits) - 1
    group = columns if group < 0 else group
    groups = np.arange(columns) // group
    if shuffled:
        groups = np.random.default_rng(0).permutation(groups)
    values = weight.numpy().copy()
    # A row that is nowhere below 0 has zeros of 0.
    values[1] = np.abs(values[1])
    scales, zeros = (np.empty((rows, groups.max() + 1)) for _ in range(2))
    for g in range(groups.max() + 1):
        part = values[:, groups == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            scales[:, g], zeros[:, g] = 2 * np.abs(part).max(1) / most, (most + 1) // 2
        else:
            scales[:, g] = (high - low) / most
            zeros[:, g] = np.rint(-low / scales[:, g]).clip(0, most)
    rounded = torch.from_numpy(scales).to(scale)
    numbers = np.rint(values / rounded.double().numpy()[:, groups] + zeros[:, groups]).clip(0, most)
    return Integers(numbers.astype(np.int64), rounded, zeros.astype(np.int64), groups)


def _gptq(weight: Tensor, given: Any) -> tuple[Packed, Tensor]:
    bits = given["bits"]
    made = _integers(weight, bits, given["group"], given["symmetric"], given.get("shuffled", False), torch.float16)
    packed = {
        "qweight": words(made.numbers, bits).T,
        "qzeros": words(made.zeros.T, bits) - given["offset"] * words(np.ones((1, 32 // bits), np.int64), bits),
        "scales": made.scales.T,
        "g_idx": torch.from_numpy(made.groups.astype(np.int32)),
    }
    return packed, made.meant


def _awq(weight: Tensor, given: Any) -> tuple[Packed, Tensor]:
    made = _integers(weight, 4, given["group"], False, False, torch.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(by_input: NDArray[np.int64]) -> Tensor:
        return words(by_input.reshape(len(by_input), -1, 8)[..., order].reshape(by_input.shape), 4)

    return {"qweight": pack(made.numbers.T), "qzeros": pack(made.zeros.T), "scales": made.scales.T}, made.meant


def _packed(weight: Tensor, given: Any) -> tuple[Packed, Tensor]:
    bits, symmetric, shuffled = given["bits"], given["symmetric"], given.get("shuffled", False)
    made = _integers(weight, bits, given["group"], symmetric, shuffled, torch.bfloat16)
    packed = {
        "weight_packed": words(made.numbers, bits),
        "weight_scale": made.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        packed["weight_zero_point"] = words(made.zeros.T, bits).T
    if shuffled:
        packed["weight_g_idx"] = torch.from_numpy(made.groups.astype(np.int32))
    return packed, made.meant


def _int8(weight: Tensor, given: Any) -> tuple[Packed, Tensor]:
    made = _integers(weight, 8, -1, given["symmetric"], False, torch.bfloat16)
    packed = {"weight": torch.from_numpy(made.numbers - 128).to(torch.int8), "weight_scale": made.scales}
    if not given["symmetric"]:
        packed["weight_zero_point"] = torch.from_numpy(made.zeros - 128).to(torch.int8)
    return packed, made.meant


def _float8(weight: Tensor, given: Any) -> tuple[Packed, Tensor]:
    """One scale for blocks of `block` outputs and inputs, whatever is left of them at the ends."""
    height, width = (size if wanted < 0 else wanted for wanted, size in zip(given["block"], weight.shape, strict=True))
    blocks = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
    scales = torch.empty(blocks)
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            part = weight[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scales[i, j] = part.abs().max() / 448
    scales = scales.to(given["dtype"])
    spread = scales.float().repeat_interleave(height, 0).repeat_interleave(width, 1)[: len(weight), : weight.shape[1]]
    numbers = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    kept = scales.reshape(given.get("shape", scales.shape))
    return {"weight": numbers, given["part"]: kept}, numbers.float() * spread


def _gptq_layout(bits: int, group: int, form: str = "gptq", **given: Any) -> Layout:
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": form}
    how = {"bits": bits, "group": group, "offset": int(form == "gptq"), "symmetric": False} | given
    return Layout(settings | {"desc_act": "shuffled" in given, "sym": how["symmetric"]}, _gptq, how)


def _compressed(form: str, pack: Callable[[Tensor, Any], tuple[Packed, Tensor]], **given: Any) -> Layout:
    weights: dict[str, Any] = {"strategy": "channel"}
    if "block_structure" in given:
        weights = {"strategy": "block", "block_structure": given["block_structure"]}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return Layout({"quant_method": "compressed-tensors", "format": form, "config_groups": groups}, pack, given)


_BF16_SCALE = {"part": "weight_scale", "dtype": torch.bfloat16}
_INVERSE = {"part": "weight_scale_inv", "dtype": torch.float32}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}

LAYOUTS: dict[str, Layout] = {
    "gptq int4 groups of 32": _gptq_layout(4, 32),
    "gptq int4 symmetric": _gptq_layout(4, 64, symmetric=True),
    "gptq int4 v2 by row": _gptq_layout(4, -1, "gptq_v2"),
    "gptq int4 any order": _gptq_layout(4, 32, shuffled=True),
    "gptq int8": _gptq_layout(8, 64),
    "gptq int8 symmetric": _gptq_layout(8, 32, symmetric=True),
    "awq": Layout({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, _awq, {"group": 64}),
    "packed int4": _compressed("pack-quantized", _packed, bits=4, group=32, symmetric=True),
    "packed int4 with zeros": _compressed("pack-quantized", _packed, bits=4, group=64, symmetric=False),
    "packed int4 any order": _compressed("pack-quantized", _packed, bits=4, group=32, symmetric=False, shuffled=True),
    "packed int8": _compressed("pack-quantized", _packed, bits=8, group=-1, symmetric=True),
    "int8 by row": _compressed("int-quantized", _int8, symmetric=True),
    "int8 by row with zeros": _compressed("int-quantized", _int8, symmetric=False),
    "float8 by row": _compressed("float-quantized", _float8, block=(1, -1), **_BF16_SCALE),
    "float8 by matrix": _compressed("float-quantized", _float8, block=(-1, -1), shape=(1,), **_BF16_SCALE),
    "float8 in blocks": _compressed(
        "float-quantized", _float8, block=(48, 32), block_structure=[48, 32], **_BF16_SCALE
    ),
    "fp8 by matrix": Layout(_FP8, _float8, {"block": (-1, -1), "shape": (), **_BF16_SCALE}),
    "fp8 in blocks": Layout(_FP8 | {"weight_block_size": [48, 48]}, _float8, {"block": (48, 48), **_INVERSE}),
}
