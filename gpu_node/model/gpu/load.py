"""Build the GPU runner for a described model, with a KV cache in the GPU memory that is left."""

from __future__ import annotations

import logging
import os
import warnings
from functools import partial

import torch

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.description import Description, cache_sizes, num_host_blocks
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.checkpoint.files import Checkpoint
from penstock.gpu_node.model.checkpoint.source import Progress
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors
from penstock.gpu_node.model.gpu.adapters import GpuAdapters
from penstock.gpu_node.model.gpu.decoder import GpuDecoder
from penstock.gpu_node.model.gpu.device import MIN_COMPUTE_CAPABILITY, Device
from penstock.gpu_node.model.gpu.graph_shapes import bucket_sizes
from penstock.gpu_node.model.gpu.kv_pool import KvLayout, KvPool
from penstock.gpu_node.model.gpu.linear import SCALED, can_pack_int4
from penstock.gpu_node.model.gpu.offload import OffloadedLayers
from penstock.gpu_node.model.gpu.profile import bytes_left, peak_bytes, run_largest_step
from penstock.gpu_node.model.gpu.row_marks import FIRST_ROWS
from penstock.gpu_node.model.gpu.runner import GpuRunner, Limits
from penstock.gpu_node.model.gpu.stored import StoredLinearLoader
from penstock.gpu_node.model.gpu.weights import load_weights
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.protocol import CacheSizes
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory
from penstock.kernels.triton.products import MEDIUM_ROWS

_log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_KV_DTYPES = _DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_UTILIZATION = 0.9


@translate_out_of_memory()
def load_gpu(described: Description, options: RunnerOptions, progress: Progress) -> tuple[GpuRunner, str]:
    """Return the runner and the name of its arithmetic. Raises ConfigError for a missing or unsupported feature."""
    device = Device(_device())
    spec, name = described.spec, _dtype_name(options.dtype, described.stored_dtype)
    _check(options, spec, device)
    kept = name if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    layout = KvLayout(spec, options.block_size, _KV_DTYPES[kept])
    tensors = DecoderTensors(Checkpoint.open(described.source, described.read_scaled), spec)
    keep, report = StoredLinearLoader(options.quantization, device), lambda done: progress("load", done)
    # A separate Device has its own side stream, because the KV pool's one copies in the other direction.
    stream = partial(OffloadedLayers, spec.num_layers, options.cpu_offload_gib, Device(device.torch))
    gather = stream if options.cpu_offload_gib else tuple
    weights = load_weights(tensors, spec, _DTYPES[name], report, device.torch, keep, gather)
    weight_bytes = device.allocated_bytes()
    decoder = GpuDecoder(spec, weights, described.max_model_len)
    adapters = GpuAdapters(spec, options.num_adapter_slots, options.max_lora_rank, _DTYPES[name], device.torch)
    sizes = _sizes(described, options, decoder, layout, device)
    pool = KvPool(layout, sizes.num_device_blocks, sizes.num_host_blocks, device)
    limits = Limits(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        described.max_model_len,
        options.block_size,
        options.deterministic,
    )
    if options.deterministic and device.is_gpu:
        _forbid_split_sums()
    runner = GpuRunner(decoder, adapters, pool, sizes, limits, device, weight_bytes)
    if device.is_gpu:
        _compile_rest(runner, decoder, pool, options)
    formats = "+".join(sorted(keep.formats))
    arithmetic = {"dtype": name, "quantization": formats, "kv_cache_dtype": kept}
    blocks = {"num_kv_blocks": sizes.num_device_blocks, "num_swap_blocks": sizes.num_host_blocks}
    _log.info("gpu runner", extra={"device": str(device.torch), **arithmetic, **blocks})
    parts = "gpu", name, *((formats,) if formats != "none" else ()), "kv", kept
    return runner, "-".join((*parts, "deterministic") if options.deterministic else parts)


def _compile_rest(runner: GpuRunner, decoder: GpuDecoder, pool: KvPool, options: RunnerOptions) -> None:
    """Compile the kernels that steps outside of graphs need, before the first request arrives."""
    limit = options.max_num_batched_tokens
    # Tile sizes of matrix products depend on the number of rows, which may exceed that of every graph.
    for num_tokens in sorted({min(MEDIUM_ROWS, limit), limit}):
        run_largest_step(decoder, pool, num_tokens, options.max_num_seqs)
    runner.compile_rest()


def _device() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        if capability < MIN_COMPUTE_CAPABILITY:
            has, wanted = (".".join(map(str, pair)) for pair in (capability, MIN_COMPUTE_CAPABILITY))
            raise ConfigError(f"runner gpu: {name} has compute capability {has}; at least {wanted} is needed")
        return device
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "runner gpu: torch sees no CUDA device (TRITON_INTERPRET=1 runs its kernels slowly on the CPU)"
        )
    return torch.device("cpu")


def _check(options: RunnerOptions, spec: ModelSpec, device: Device) -> None:
    quantization = options.quantization
    if quantization not in ("auto", "none", "int4", *SCALED):
        raise ConfigError(
            f"quantization {quantization} is not supported on a GPU; supported: auto, none, int8, int4 or fp8"
        )
    if quantization == "int4" and not can_pack_int4(
        spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    ):
        raise ConfigError("quantization int4 needs matrices with a multiple of 32 columns")
    if "fp8" in (quantization, options.kv_cache_dtype) and not device.has_float8:
        raise ConfigError("fp8 needs a GPU of compute capability 8.9 or later")


def _dtype_name(wanted: str, stored: str) -> str:
    if wanted != "auto":
        return wanted
    return stored if stored in ("bfloat16", "float16") else "float32"


def _forbid_split_sums() -> None:
    """Forbid split-K matrix products, whose partial sums are added in a varying order.

    Only cuBLASLt supports this; with torch's default BLAS library, products would fail.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the API is experimental
        torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)


def _sizes(
    described: Description, options: RunnerOptions, decoder: GpuDecoder, layout: KvLayout, device: Device
) -> CacheSizes:
    """Return the size of the KV cache.

    On a GPU without num_kv_blocks, the cache gets the memory that the largest step leaves. Without a GPU,
    kv_cache_gib sizes it.
    """
    token_bytes, vocab = layout.block_bytes // options.block_size, described.spec.vocab_size
    if not device.is_gpu:
        return cache_sizes(described, options.model_copy(update={"cpu_offload_gib": 0.0}), token_bytes)
    num_blocks = options.wanted_blocks
    if num_blocks is None:
        # Return memory that only loading needed.
        torch.cuda.empty_cache()
        peak = peak_bytes(decoder, KvPool(layout, 1, 0, device), options.max_num_batched_tokens, options.max_num_seqs)
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        share = options.gpu_memory_utilization or _UTILIZATION
        # Memory for the rows of marks and for the logits of the largest graph.
        sampling = (8 * FIRST_ROWS + decoder.dtype.itemsize * bucket_sizes(options.max_num_seqs)[-1]) * vocab
        left = bytes_left(total=total, free=free, reserved=reserved, peak=peak + sampling, utilization=share)
        num_blocks = left // layout.block_bytes - 1
        if num_blocks < 1:
            raise ConfigError(f"gpu_memory_utilization {share} leaves no block of {options.block_size} tokens")
    return CacheSizes(num_blocks, num_host_blocks(options, layout.block_bytes), layout.block_bytes)
