"""Safetensors files to the tensors a decoder multiplies with."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.linear import Linear
from penstock.gpu_node.model.spec import ModelSpec, NameMap


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attention_norm: Tensor
    qkv: Linear
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden]: queries, keys, values."""
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    """[2 * intermediate, hidden]: gate, up."""
    down: Linear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All tensors of a decoder; `head` multiplies with `embedding` where the checkpoint ties them."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises ConfigError when there are none, or only pickles."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"{index} names files that are not there: {', '.join(missing)}")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ConfigError(f"{folder} has only pickled weights, which can run code; want .safetensors or .gguf")
    raise ConfigError(f"{folder} has no .safetensors weights")


def load_weights(
    folder: Path, spec: ModelSpec, names: NameMap, dtype: torch.dtype, progress: Callable[[float], None]
) -> DecoderWeights:
    """Read, fuse and convert a checkpoint. Raises ConfigError naming a tensor that is missing or of another shape."""
    with ExitStack() as stack:
        reader = _Reader(stack, weight_files(folder), dtype)
        hidden, vocab = spec.hidden_size, spec.vocab_size
        embedding = reader.read(names.embedding, vocab, hidden)
        layers = []
        for layer in range(spec.num_layers):
            layers.append(_load_layer(reader, spec, names, layer))
            progress((layer + 1) / spec.num_layers)
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(layers),
            final_norm=reader.read(names.final_norm, hidden),
            head=Linear(embedding if spec.tied_head else reader.read(names.head, vocab, hidden)),
        )


def _load_layer(reader: _Reader, spec: ModelSpec, names: NameMap, layer: int) -> LayerWeights:
    hidden, inter = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def read(name: str, *shape: int) -> Tensor:
        return reader.read(name.format(layer=layer), *shape)

    return LayerWeights(
        attention_norm=read(names.attention_norm, hidden),
        qkv=Linear(
            torch.cat((read(names.q, q_size, hidden), read(names.k, kv_size, hidden), read(names.v, kv_size, hidden)))
        ),
        o=Linear(read(names.o, hidden, q_size)),
        mlp_norm=read(names.mlp_norm, hidden),
        gate_up=Linear(torch.cat((read(names.gate, inter, hidden), read(names.up, inter, hidden)))),
        down=Linear(read(names.down, hidden, inter)),
    )


class _Reader:
    """Finds tensors by name over the files of a checkpoint."""

    def __init__(self, stack: ExitStack, files: list[Path], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._file_of: dict[str, Any] = {}
        for path in files:
            file = stack.enter_context(safe_open(path, framework="pt"))
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def read(self, name: str, *shape: int) -> Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ConfigError(f"the checkpoint has no tensor {name}")
        tensor: Tensor = file.get_tensor(name)
        if tensor.shape != shape:
            raise ConfigError(f"tensor {name} has shape {list(tensor.shape)}, the config says {list(shape)}")
        return tensor.to(self._dtype).contiguous()
