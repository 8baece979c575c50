"""The same model with other numbers: weights that a quantizer has not seen, for a file that is quantized already.

Each way changes the weights but, in exact arithmetic, not what the model computes. Only for layers as Llama's: RMSNorm
before each projection, gate and up multiplied, no biases.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.contract.errors import ConfigError

MAX_FACTOR = 2**0.5
"""A channel is multiplied or divided by up to this much."""
MIX = 64
"""Channels that are mixed with each other: two groups of a quantizer."""
GROUP = 32

Tensors = dict[str, Tensor]
_EMBEDDING, _HEAD, _FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_READERS = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}


def make(source: Path, grid: str, folder: Path, rounding: str | None = None) -> Path:
    """Writes the model of `source` on a grid, in bfloat16, to a new `folder`; `rounding` quantizes and dequantizes."""
    config = json.loads((source / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    if any(name.endswith(".bias") for name in tensors):
        raise ConfigError("a model with biases cannot be put on another grid")
    tensors.setdefault(_HEAD, tensors[_EMBEDDING])
    GRIDS[grid](tensors, config)
    if rounding is not None:
        # What is rounded is what the kernels read: bfloat16.
        tensors = {n: t if t.ndim == 1 else _rounded(n, t.bfloat16().float(), rounding) for n, t in tensors.items()}
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    stored = {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False, "dtype": "bfloat16"}))
    return folder


def scale(tensors: Tensors, config: dict[str, Any]) -> None:
    """Multiply the channels between two matrices by random factors, and divide by them on the other side.

    The outliers stay, and the factors within a group differ, so its range is wider than before. The embedding's rows
    stay as they are: nothing undoes a factor there.
    """
    random = torch.Generator().manual_seed(0)

    def factors(count: int) -> Tensor:
        return MAX_FACTOR ** (2 * torch.rand(count, generator=random) - 1)

    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for prefix in _layers(config):
        for norm, names in _READERS.items():
            between = factors(config["hidden_size"])
            _scale_norm(tensors, f"{prefix}.{norm}.weight", [_matrix(prefix, name) for name in names], between)
        up, down = _matrix(prefix, "up_proj"), _matrix(prefix, "down_proj")
        between = factors(len(tensors[up]))
        tensors[up], tensors[down] = tensors[up] * between[:, None], tensors[down] / between
        v, o = _matrix(prefix, "v_proj"), _matrix(prefix, "o_proj")
        between = factors(len(tensors[v]))
        tensors[v] = tensors[v] * between[:, None]
        by_head = between.reshape(num_kv_heads, -1).repeat_interleave(num_heads // num_kv_heads, dim=0)
        tensors[o] = tensors[o] / by_head.reshape(-1)
    _scale_norm(tensors, _FINAL_NORM, [_HEAD], factors(config["hidden_size"]))


def rotate(tensors: Tensors, config: dict[str, Any]) -> None:
    """Turn the stream between the layers by a Hadamard matrix per MIX channels, as QuaRot does (arXiv:2404.00456).

    The norms' weights go into the matrices behind them. It spreads outliers, those of activations above all, and makes
    weights Gaussian.
    """
    turn = _hadamard_blocks(config["hidden_size"])
    for prefix in _layers(config):
        for norm, names in _READERS.items():
            _turn_norm(tensors, f"{prefix}.{norm}.weight", [_matrix(prefix, name) for name in names], turn)
        for name in ("o_proj", "down_proj"):
            tensors[_matrix(prefix, name)] = turn.T @ tensors[_matrix(prefix, name)]
    _turn_norm(tensors, _FINAL_NORM, [_HEAD], turn)
    tensors[_EMBEDDING] = tensors[_EMBEDDING] @ turn


GRIDS: dict[str, Callable[[Tensors, dict[str, Any]], None]] = {"scaled": scale, "rotated": rotate}


def round_int8(weights: Tensor) -> Tensor:
    """One scale per row."""
    step = weights.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (weights / step).round() * step


def round_int8_group(weights: Tensor) -> Tensor:
    """A float16 scale per GROUP columns."""
    groups = weights.reshape(len(weights), -1, GROUP)
    step = (groups.abs().amax(2, keepdim=True) / 127).half().float().clamp_min(1e-30)
    return ((groups / step).round().clamp(-128, 127) * step).reshape(weights.shape)


def round_int4(weights: Tensor) -> Tensor:
    """A float16 scale and minimum per GROUP columns."""
    groups = weights.reshape(len(weights), -1, GROUP)
    least = groups.amin(2, keepdim=True).half().float()
    step = ((groups.amax(2, keepdim=True) - least).clamp_min(0) / 15).half().float().clamp_min(1e-30)
    return (((groups - least) / step).round().clamp(0, 15) * step + least).reshape(weights.shape)


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "int8": round_int8,
    "int8_group": round_int8_group,
    "int4": round_int4,
}
"""What the native kernels' formats do to weights, written down a second time."""
INT4_HEAD8 = "int4, head int8_group"
"""The head and the embedding more precise than the layers, as GGUF's files have them."""


def _rounded(name: str, weights: Tensor, rounding: str) -> Tensor:
    if rounding == INT4_HEAD8:
        rounding = "int8_group" if name in (_EMBEDDING, _HEAD) else "int4"
    return ROUNDINGS[rounding](weights)


def _layers(config: dict[str, Any]) -> list[str]:
    return [f"model.layers.{layer}" for layer in range(config["num_hidden_layers"])]


def _matrix(prefix: str, name: str) -> str:
    block = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"{prefix}.{block}.{name}.weight"


def _scale_norm(tensors: Tensors, norm: str, readers: list[str], factors: Tensor) -> None:
    tensors[norm] = tensors[norm] / factors
    for name in readers:
        tensors[name] = tensors[name] * factors


def _turn_norm(tensors: Tensors, norm: str, readers: list[str], turn: Tensor) -> None:
    for name in readers:
        tensors[name] = (tensors[name] * tensors[norm]) @ turn
    tensors[norm] = torch.ones_like(tensors[norm])


def _hadamard_blocks(size: int) -> Tensor:
    """Orthogonal, [size, size]: Hadamard matrices with random signs along the diagonal."""
    if size % MIX:
        raise ConfigError(f"a hidden size of {size} is no multiple of {MIX}")
    block = torch.ones(1, 1)
    while len(block) < MIX:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    signs = 2.0 * torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(0)) - 1
    return signs * torch.block_diag(*[block / MIX**0.5] * (size // MIX))
