"""Shapes of well-known models with random weights, made on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from penstock.gpu_node.model.architecture.spec import ModelSpec, NameMap, Rope
from penstock.gpu_node.model.gpu.adapters import GpuAdapters
from penstock.gpu_node.model.gpu.decoder import GpuDecoder
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.kv_pool import KvLayout, KvPool
from penstock.gpu_node.model.gpu.linear import PlainLinear, linear_of
from penstock.gpu_node.model.gpu.runner import GpuRunner, Limits
from penstock.gpu_node.model.protocol import CacheSizes
from penstock.gpu_node.model.torch_common.layers import DecoderWeights, LayerWeights
from penstock.gpu_node.model.torch_common.norm import Norm

BLOCK_SIZE = 16
_NAMES = NameMap(
    **dict.fromkeys(("embedding", "final_norm", "head", "attention_norm", "out", "mlp_norm", "mlp_out"), ""),
    qkv=("q", "k", "v"),
    mlp_in=("gate", "up"),
)


def _spec(name_map: NameMap = _NAMES, **shapes: int | bool) -> ModelSpec:
    plain = {"max_position": 40960, "norm_eps": 1e-6, "tied_head": False, "names": name_map}
    windows = (None,) * int(shapes["num_layers"])
    return ModelSpec(rope=Rope(500_000.0, int(shapes["head_dim"])), windows=windows, **plain | shapes)


SPECS = {
    "llama-3.1-8b": _spec(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    ),
    "qwen3-0.6b": _spec(
        NameMap(**{name: getattr(_NAMES, name) for name in _NAMES.__slots__} | {"q_norm": "q", "k_norm": "k"}),
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        tied_head=True,
    ),
    "tiny": _spec(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_position=256,
    ),
}


@dataclass(frozen=True)
class Model:
    """A runner on random weights, and what it has to read."""

    name: str
    spec: ModelSpec
    runner: GpuRunner
    sizes: CacheSizes
    max_num_seqs: int
    max_model_len: int
    num_weights: int
    """Of all matrices, the head's included."""
    weight_bytes: int
    """Of those."""
    kv_token_bytes: int


def make_model(
    name: str, device: Device, *, dtype: torch.dtype, max_num_seqs: int, max_model_len: int, quantization: str = "none"
) -> Model:
    """A model on a cache of most of the GPU's free memory; `quantization` is none, int8 or fp8."""
    spec = SPECS[name]
    decoder = GpuDecoder(spec, _random_weights(spec, dtype, device.torch, quantization), max_model_len)
    layout = KvLayout(spec, BLOCK_SIZE, dtype)
    free = torch.cuda.mem_get_info()[0] if device.is_gpu else layout.block_bytes * 80
    num_blocks = int(0.8 * free) // layout.block_bytes
    sizes = CacheSizes(num_blocks, 0, layout.block_bytes)
    pool = KvPool(layout, num_blocks, 0, device)
    no_adapters = GpuAdapters(spec, 0, 0, dtype, device.torch)
    runner = GpuRunner(decoder, no_adapters, pool, sizes, Limits(max_num_seqs, max_model_len, BLOCK_SIZE), device)
    per_layer = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim + spec.num_heads * spec.head_dim
    rows = spec.num_layers * (per_layer + 3 * spec.intermediate_size) + spec.vocab_size
    num_weights = rows * spec.hidden_size
    head_bytes = spec.vocab_size * spec.hidden_size * dtype.itemsize
    per_weight = dtype.itemsize if quantization == "none" else 1
    return Model(
        name=name,
        spec=spec,
        runner=runner,
        sizes=sizes,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_weights=num_weights,
        weight_bytes=(num_weights - spec.vocab_size * spec.hidden_size) * per_weight + head_bytes,
        kv_token_bytes=layout.block_bytes // BLOCK_SIZE,
    )


def _random_weights(spec: ModelSpec, dtype: torch.dtype, device: torch.device, quantization: str) -> DecoderWeights:
    linear = linear_of(quantization)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device).normal_(std=columns**-0.5)

    def norm(size: int) -> Norm:
        return Norm(torch.ones(size, dtype=dtype, device=device), None, spec.norm_eps)

    def layer() -> LayerWeights:
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        has_head_norms = spec.names.q_norm is not None
        return LayerWeights(
            attention_norm=norm(spec.hidden_size),
            qkv=linear(matrix(queries + 2 * keys, spec.hidden_size), None),
            head_norms=(norm(spec.head_dim), norm(spec.head_dim)) if has_head_norms else None,
            out=linear(matrix(spec.hidden_size, queries), None),
            mlp_norm=norm(spec.hidden_size),
            mlp_in=linear(matrix(2 * spec.intermediate_size, spec.hidden_size), None),
            mlp_out=linear(matrix(spec.hidden_size, spec.intermediate_size), None),
        )

    embedding = matrix(spec.vocab_size, spec.hidden_size)
    head = embedding if spec.tied_head else matrix(spec.vocab_size, spec.hidden_size)
    layers = tuple(layer() for _ in range(spec.num_layers))
    return DecoderWeights(
        partial(functional.embedding, weight=embedding), layers, norm(spec.hidden_size), PlainLinear(head, None)
    )
