"""A checkpoint to the torch tensors a decoder multiplies with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.gpu_node.model.checkpoint import Checkpoint, StoredTensor
from penstock.gpu_node.model.linear import Linear
from penstock.gpu_node.model.spec import ModelSpec, NameMap

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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


def load_weights(
    checkpoint: Checkpoint, spec: ModelSpec, names: NameMap, dtype: torch.dtype, progress: Callable[[float], None]
) -> DecoderWeights:
    """Read, fuse and convert a checkpoint. Raises ConfigError naming a tensor that is missing or of another shape."""

    def read(name: str, *shape: int) -> Tensor:
        return _tensor(checkpoint.get(name, *shape), dtype)

    hidden, vocab = spec.hidden_size, spec.vocab_size
    embedding = read(names.embedding, vocab, hidden)
    layers = []
    for layer in range(spec.num_layers):
        layers.append(_load_layer(read, spec, names, layer))
        progress((layer + 1) / spec.num_layers)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=read(names.final_norm, hidden),
        head=Linear(embedding if spec.tied_head else read(names.head, vocab, hidden)),
    )


def _load_layer(read_named: Callable[..., Tensor], spec: ModelSpec, names: NameMap, layer: int) -> LayerWeights:
    hidden, inter = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def read(name: str, *shape: int) -> Tensor:
        return read_named(name.format(layer=layer), *shape)

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


def _tensor(stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    kind = _FLOATS.get(stored.kind)
    if kind is None or stored.row_order is not None:
        return torch.from_numpy(stored.to_float32()).to(dtype)
    return torch.from_numpy(stored.data.copy()).view(kind).reshape(stored.shape).to(dtype)
