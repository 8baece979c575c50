"""Runners of well-known shapes with random weights, made on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.architecture.families import family_of
from penstock.gpu_node.model.architecture.mlp import Mlp
from penstock.gpu_node.model.architecture.spec import MATRICES, Attention, LayerSpec, ModelSpec
from penstock.gpu_node.model.checkpoint.dummy import SHAPES
from penstock.gpu_node.model.gpu.adapters import GpuAdapters
from penstock.gpu_node.model.gpu.decoder import GpuDecoder, GpuWeights
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.kv_pool import KvLayout, KvPool
from penstock.gpu_node.model.gpu.linear import EmbeddingTable, KeptLinear, linear_of, pad_rows, padded_head
from penstock.gpu_node.model.gpu.offload import OffloadedLayers
from penstock.gpu_node.model.gpu.runner import GpuRunner, Limits
from penstock.gpu_node.model.protocol import CacheSizes
from penstock.gpu_node.model.torch_common.layers import LayerWeights, NoNorm, Norm
from penstock.gpu_node.model.torch_common.ranks import ONE_RANK, Communicator

BLOCK_SIZE = 16
_SHARE = 0.8
"""Of the free memory, for the KV cache."""
_DRY_BLOCKS = 80


@dataclass(frozen=True)
class Model:
    """A runner on random weights, and what it has to read."""

    name: str
    spec: ModelSpec
    weights: GpuWeights
    runner: GpuRunner
    sizes: CacheSizes
    max_num_seqs: int
    max_model_len: int
    quantization: str
    kv_token_bytes: int
    head_num_bytes: int

    @property
    def matrix_weights(self) -> int:
        """The number of weights in the layers' matrices."""
        return sum(map(self.spec.layer_weights, self.spec.layers))

    @property
    def weight_bytes(self) -> float:
        """Bytes of all matrices that a step reads, the head's included.

        int4 has 4 bytes, a scale and a minimum, per 32 weights.
        """
        bits = {"none": 8 * self.weights.dtype.itemsize, "int8": 8, "fp8": 8, "int4": 5}[self.quantization]
        return self.matrix_weights * bits / 8 + self.head_num_bytes


def spec_of(name: str) -> ModelSpec:
    """Return the spec of a named shape."""
    return family_of(SHAPES[name]).spec_of(SHAPES[name])


def parts_of(layer: LayerSpec) -> tuple[Attention, Mlp]:
    """Return both parts of a layer, which all layers on a GPU have."""
    if layer.attention is None or layer.mlp is None:
        raise InvariantError("a layer on a GPU has attention and an MLP")
    return layer.attention, layer.mlp


@dataclass(frozen=True)
class Options:
    """How a model's runner is built."""

    dtype: torch.dtype = torch.bfloat16
    quantization: str = "none"
    """none, int8, fp8 or int4."""
    kv_dtype: torch.dtype | None = None
    """None: as `dtype`."""
    max_num_seqs: int = 64
    max_model_len: int = 16_384
    num_blocks: int | None = None
    """None: most of the GPU's free memory."""
    num_adapters: int = 0
    max_lora_rank: int = 8
    deterministic: bool = False
    by_layer: bool = False
    """Whether the KV cache has the blocks of each layer one after another."""
    dependent_launches: bool = True
    """Whether the kernels of graphs start while the kernel ahead of them runs."""
    num_offloaded: int = 0
    """Layers whose matrices are in host memory; 0, or at least 3."""
    ranks: Communicator = ONE_RANK
    """A group of one rank, whose exchanges change nothing."""


def make_model(name: str, spec: ModelSpec, device: Device, options: Options) -> Model:
    """Return a runner on random weights, which are the same for the same torch seed."""
    weights = random_weights(spec, options, device.torch)
    if options.num_offloaded:
        weights = _offload(weights, options.num_offloaded, device)
    decoder = GpuDecoder(spec, weights, options.max_model_len, ranks=options.ranks)
    layout = KvLayout(spec, BLOCK_SIZE, options.kv_dtype or options.dtype, by_layer=options.by_layer)
    free = torch.cuda.mem_get_info()[0] if device.is_gpu else layout.block_bytes * _DRY_BLOCKS / _SHARE
    num_blocks = options.num_blocks or int(_SHARE * free) // layout.block_bytes
    sizes = CacheSizes(num_blocks, 0, layout.block_bytes)
    pool = KvPool(layout, num_blocks, 0, device)
    adapters = GpuAdapters(spec, options.num_adapters, options.max_lora_rank, options.dtype, device)
    limits = Limits(
        options.max_num_seqs,
        options.max_model_len,
        BLOCK_SIZE,
        options.deterministic,
        dependent_launches=options.dependent_launches,
    )
    return Model(
        name=name,
        spec=spec,
        weights=weights,
        runner=GpuRunner(decoder, adapters, pool, sizes, limits, device),
        sizes=sizes,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        quantization=options.quantization,
        kv_token_bytes=layout.block_bytes // BLOCK_SIZE,
        head_num_bytes=spec.vocab_size * spec.hidden_size * _head_itemsize(options),
    )


def _head_itemsize(options: Options) -> int:
    """Return the bytes of one weight of the head, as `padded_head` stores it."""
    return 1 if options.quantization == "fp8" else options.dtype.itemsize


def _offload(weights: GpuWeights, count: int, device: Device) -> GpuWeights:
    """Offload `count` layers, which must be unquantized and without biases."""
    layers = list(weights.layers)
    layer_gib = sum(getattr(layers[0], name).weight.nbytes for name in MATRICES) / (1 << 30)
    # A Device of its own has a side stream of its own, as in serving.
    offloaded = OffloadedLayers(len(layers), (count - 0.5) * layer_gib, Device(device.torch), layers)
    return replace(weights, layers=offloaded)


def random_weights(spec: ModelSpec, options: Options, device: torch.device) -> GpuWeights:
    """Return weights that keep the scale of activations: normal numbers, norms near 1, small biases."""
    dtype, is_fixed = options.dtype, options.deterministic
    linear = linear_of(options.quantization, deterministic=is_fixed)

    def random(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device).normal_(mean, std)

    def matrix(rows: int, columns: int, *, has_bias: bool) -> KeptLinear:
        bias = random(rows, std=0.1) if has_bias else None
        return linear(random(rows, columns, std=columns**-0.5), bias)

    def norm(size: int, *, centred: bool = False) -> Norm:
        mean = 1.0 - spec.norm_offset
        return Norm(
            random(size, std=0.1, mean=mean),
            random(size, std=0.1) if centred else None,
            spec.norm_eps,
            spec.norm_offset,
        )

    def layer(of: LayerSpec) -> LayerWeights:
        (attention, mlp), hidden, is_layer_norm = parts_of(of), spec.hidden_size, spec.norm == "layer"
        queries, keys, inner, dim = attention.queries, attention.keys, mlp.intermediate_size, attention.head_dim
        before = NoNorm(dtype, device) if of.attention_norm is None else norm(hidden, centred=is_layer_norm)
        widths = (queries, keys) if attention.joint_head_norms else (dim, dim)
        return LayerWeights(
            attention_norm=before,
            qkv=matrix(queries + 2 * keys, hidden, has_bias=attention.qkv_bias),
            head_norms=None if attention.q_norm is None else (norm(widths[0]), norm(widths[1])),
            out=matrix(hidden, queries, has_bias=attention.out_bias),
            mlp_norm=before if of.mlp_norm is None else norm(hidden, centred=is_layer_norm),
            mlp_in=matrix((2 if mlp.is_gated else 1) * inner, hidden, has_bias=mlp.bias),
            mlp_out=matrix(hidden, inner, has_bias=mlp.bias),
            post_attention_norm=None if of.post_attention_norm is None else norm(hidden),
            post_mlp_norm=None if of.post_mlp_norm is None else norm(hidden),
        )

    embedding = pad_rows(random(spec.vocab_size, spec.hidden_size, std=1.0))
    head = embedding if spec.tied_head else random(spec.vocab_size, spec.hidden_size, std=spec.hidden_size**-0.5)
    layers = tuple(map(layer, spec.layers))
    final = norm(spec.hidden_size, centred=spec.norm == "layer")
    return GpuWeights(
        EmbeddingTable(embedding), layers, final, padded_head(head, options.quantization, deterministic=is_fixed)
    )
