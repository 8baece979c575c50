"""Build the GPU runner for a described model, with a KV cache in the GPU memory that is left."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial

import torch

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.rank_part import RankPart
from penstock.gpu_node.model.architecture.spec import ModelSpec, state_bytes
from penstock.gpu_node.model.checkpoint.description import Description, cache_sizes, num_host_blocks
from penstock.gpu_node.model.checkpoint.rank_tensors import RankTensors
from penstock.gpu_node.model.checkpoint.source import Progress
from penstock.gpu_node.model.gpu.adapters import GpuAdapters
from penstock.gpu_node.model.gpu.decoder import GpuDecoder
from penstock.gpu_node.model.gpu.device import MIN_COMPUTE_CAPABILITY, Device
from penstock.gpu_node.model.gpu.graphs import GraphShapes
from penstock.gpu_node.model.gpu.inputs import FIRST_ROWS
from penstock.gpu_node.model.gpu.kv_pool import KvLayout, KvPool
from penstock.gpu_node.model.gpu.linear import HEAD_ROWS, SCALED, can_pack_int4, padded_head, padded_vocab
from penstock.gpu_node.model.gpu.offload import OffloadedLayers
from penstock.gpu_node.model.gpu.profile import GraphMemory, bytes_left, peak_bytes, split_bytes
from penstock.gpu_node.model.gpu.recurrent import StatePool
from penstock.gpu_node.model.gpu.runner import FIXED_SPLITS, GpuRunner, Limits
from penstock.gpu_node.model.gpu.weights import StoredLinearLoader, load_weights
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.protocol import CacheSizes
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory
from penstock.gpu_node.model.torch_common.ranks import ALONE, Communicator, RankLinks

log = logging.getLogger(__package__)


_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_KV_DTYPES = _DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_UTILIZATION = 0.9
_SWAP_GIB = 4.0
"""Swap space if no setting names one and host memory allows it."""
_GIB, _MIB = 1 << 30, 1 << 20


@translate_out_of_memory()
def load_gpu(
    described: Description, options: RunnerOptions, progress: Progress, links: RankLinks = ALONE
) -> tuple[GpuRunner, str]:
    """Return the runner of a rank and the name of its arithmetic, in which several ranks show.

    Raises ConfigError for a missing or unsupported feature.
    """
    ranks, host_ranks = links.tensor, links.world
    if options.tensor_parallel_size != ranks.size:
        raise ConfigError(f"tensor_parallel_size is {options.tensor_parallel_size}, but {ranks.size} ranks joined")
    device = Device(gpu_of(options.gpu_number))
    device.make_current()
    part = RankPart(described.spec, ranks.rank, ranks.size, vocab_multiple=HEAD_ROWS)
    spec = part.spec
    name: str = options.dtype
    if name == "auto":
        name = described.stored_dtype if described.stored_dtype in ("bfloat16", "float16") else "float32"
    _check(options, spec, device)
    kept = name if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    layout = KvLayout(spec, options.block_size, _KV_DTYPES[kept])
    tensors = RankTensors(described.open_checkpoint(), part)
    keep = StoredLinearLoader(
        options.quantization, device, deterministic=options.deterministic, keeps_blocks=options.wants_gpu
    )
    # A separate Device has its own side stream, because the KV pool's one copies in the other direction.
    stream = partial(OffloadedLayers, spec.num_layers, options.cpu_offload_gib, Device(device.torch))
    gather = stream if options.cpu_offload_gib else tuple
    head = partial(padded_head, quantization=options.quantization, deterministic=options.deterministic)
    report = partial(progress, "load")
    vocab_rows = None if ranks.size == 1 else part.vocab_width
    weights = load_weights(tensors, spec, _DTYPES[name], report, device.torch, keep, gather, head, vocab_rows)
    weight_bytes = device.allocated_bytes()
    decoder = GpuDecoder(spec, weights, described.max_model_len, part=part, ranks=ranks)
    # Its own side stream, so that adapters do not wait for swapped blocks.
    stream_of_adapters, slots = Device(device.torch), options.num_adapter_slots
    adapters = GpuAdapters(spec, slots, options.max_lora_rank, _DTYPES[name], stream_of_adapters)
    sizes = _fewest(_sizes(described, options, decoder, layout, device), host_ranks)
    states = StatePool(spec, options.state_slots, device) if spec.recurrences else None
    pool, sizes = _new_pool(options, layout, sizes, device)
    if _fewest(sizes, host_ranks) != sizes:
        raise ConfigError("another rank has no memory for the swap space; set swap_space_gib to 0")
    sizes_of_steps = options.max_num_seqs, described.max_model_len, options.block_size
    limits = Limits(
        *sizes_of_steps, options.deterministic, options.max_num_batched_tokens, enforce_eager=options.enforce_eager
    )
    capturing = partial(progress, "capture")
    runner = GpuRunner(decoder, adapters, pool, sizes, limits, device, weight_bytes, capturing, host_ranks, states)
    if device.is_gpu:
        # Before the first request arrives.
        runner.compile_eager_steps()
        runner.compile_rest()
    formats = "+".join(sorted(keep.formats))
    arithmetic = {"dtype": name, "quantization": formats, "kv_cache_dtype": kept}
    blocks = {"num_kv_blocks": sizes.num_device_blocks, "num_swap_blocks": sizes.num_host_blocks}
    of_states = {} if states is None else {"state_slots": states.num_slots, "state_bytes": states.num_bytes}
    log.info("gpu runner", extra={"device": str(device.torch), **arithmetic, **blocks, **of_states})
    parts = ["gpu", name, *((formats,) if formats != "none" else ()), "kv", kept]
    parts += ["deterministic"] * options.deterministic + [f"tp{ranks.size}"] * (ranks.size > 1)
    return runner, "-".join(parts)


def _fewest(sizes: CacheSizes, ranks: Communicator) -> CacheSizes:
    """Return the smallest number of blocks of each kind that a rank has."""
    if ranks.size == 1:
        return sizes
    counts = ranks.all_gather(torch.tensor([[sizes.num_device_blocks, sizes.num_host_blocks]]))
    num_device_blocks, num_host_blocks = counts.amin(dim=0).tolist()
    return replace(sizes, num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks)


def gpu_of(number: int | None) -> torch.device:
    """Return the GPU of this number, None: the current one. Raises ConfigError if it is not there or too old."""
    if torch.cuda.is_available():
        # Before anything starts CUDA: the next lines do.
        _avoid_fragments()
        if number is not None and number >= (count := torch.cuda.device_count()):
            last = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
            raise ConfigError(f"runner cuda:{number}: there is no such GPU; this process sees {last}", param="runner")
        device = torch.device("cuda", torch.cuda.current_device() if number is None else number)
        capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        if capability < MIN_COMPUTE_CAPABILITY:
            has, wanted = (".".join(map(str, pair)) for pair in (capability, MIN_COMPUTE_CAPABILITY))
            raise ConfigError(f"runner gpu: {name} has compute capability {has}; at least {wanted} is needed")
        return device
    name = "gpu" if number is None else f"cuda:{number}"
    if os.environ.get("TRITON_INTERPRET") != "1" or number:
        raise ConfigError(
            f"runner {name}: torch sees no CUDA device (TRITON_INTERPRET=1 runs its kernels slowly on the CPU)",
            param="runner",
        )
    return torch.device("cpu")


def free_bytes(options: RunnerOptions) -> int | None:
    """Return what a model may still take of its share of the GPU; None where the CPU runs the GPU's kernels."""
    if (device := gpu_of(options.gpu_number)).type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    share = options.gpu_memory_utilization or _UTILIZATION
    return bytes_left(total=total, free=free, reserved=0, peak=0, utilization=share)


def _avoid_fragments() -> None:
    """Let torch's allocator grow segments, unless the operator configured it. It reads this when CUDA starts."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _check(options: RunnerOptions, spec: ModelSpec, device: Device) -> None:
    quantization = options.quantization
    if quantization not in ("auto", "none", "int4", *SCALED):
        raise ConfigError(
            f"quantization {quantization} is not supported on a GPU; supported: auto, none, int8, int4 or fp8"
        )
    if options.deterministic and quantization in ("int4", "fp8"):
        # Their tiles, and so the order of their sums, depend on the number of rows.
        raise ConfigError(f"deterministic needs quantization none or int8, not {quantization}")
    if options.deterministic and options.tensor_parallel_size > 1:
        # How NCCL adds up the ranks' results depends on the size of a step.
        raise ConfigError("deterministic needs tensor_parallel_size 1")
    if options.cpu_offload_gib and spec.recurrences:
        raise ConfigError("cpu_offload_gib needs layers of equal size, but recurrent layers differ from the others")
    if options.cpu_offload_gib and any(mlp.experts is not None for mlp in spec.mlps):
        raise ConfigError("cpu_offload_gib moves no experts: it needs layers without a mixture of experts")
    columns = {spec.columns_of(layer, matrix) for layer in spec.kinds for matrix in layer.matrices}
    if quantization == "int4" and not can_pack_int4(*columns):
        raise ConfigError("quantization int4 needs matrices with a multiple of 32 columns")
    if "fp8" in (quantization, options.kv_cache_dtype) and not device.has_float8:
        raise ConfigError("fp8 needs a GPU of compute capability 8.9 or later")


def _sizes(
    described: Description, options: RunnerOptions, decoder: GpuDecoder, layout: KvLayout, device: Device
) -> CacheSizes:
    """Return the size of the KV cache.

    On a GPU without num_kv_blocks and kv_cache_gib, the cache gets the memory that the largest step and the graphs
    leave. Raises ConfigError if kv_cache_gib is more than that.
    """
    block_bytes = layout.block_bytes
    if not device.is_gpu:
        cpu_options = options.model_copy(update={"cpu_offload_gib": 0.0})
        return cache_sizes(described.max_model_len, cpu_options, block_bytes // options.block_size)
    num_blocks = options.wanted_blocks
    if num_blocks is None:
        left = _bytes_for_cache(described, options, decoder, layout, device)
        num_blocks = left // block_bytes - 1
        share = options.gpu_memory_utilization or _UTILIZATION
        if num_blocks < 1:
            of_states = _no_block_beside_states(options, decoder.spec, block_bytes, left)
            raise ConfigError(
                f"gpu_memory_utilization {share} leaves no block of {options.block_size} tokens{of_states}"
            )
        if options.kv_cache_gib is not None:
            affordable, num_blocks = num_blocks, int(options.kv_cache_gib * _GIB) // block_bytes
            if not 1 <= num_blocks <= affordable:
                limits = f"one block takes {block_bytes / _GIB:.4g} GiB, gpu_memory_utilization {share} leaves "
                raise ConfigError(
                    f"kv_cache_gib {options.kv_cache_gib} does not fit: {limits}{affordable * block_bytes / _GIB:.4g}"
                )
    num_swapped = num_host_blocks(options, block_bytes, num_blocks, _SWAP_GIB)
    return CacheSizes(num_blocks, num_swapped, block_bytes)


def _no_block_beside_states(options: RunnerOptions, spec: ModelSpec, block_bytes: int, left: int) -> str:
    """Return what an error says of states where no KV block fits beside them."""
    if not (slot_bytes := state_bytes(spec)):
        return ""
    all_bytes = options.state_slots * slot_bytes
    state, block, everything, budget = (
        f"{size / _MIB:,.4g} MiB" for size in (slot_bytes, block_bytes, all_bytes, left + all_bytes)
    )
    return (
        f": a block takes {block}, and {options.state_slots} states of recurrent layers of {state} each take "
        f"{everything} of the {budget} that weights and steps leave; set a smaller state_cache_gib"
    )


def _new_pool(options: RunnerOptions, layout: KvLayout, sizes: CacheSizes, device: Device) -> tuple[KvPool, CacheSizes]:
    """Return the KV blocks and their numbers: none on the host if that fails and no setting asks for them."""
    try:
        return KvPool(layout, sizes.num_device_blocks, sizes.num_host_blocks, device), sizes
    except (ConfigError, MemoryError) as error:
        if not sizes.num_host_blocks or options.swap_space_gib is not None or options.num_swap_blocks is not None:
            raise
        log.warning("no swap space", extra={"reason": str(error)})
    # Outside of the handler, whose traceback holds the device's blocks.
    sizes = replace(sizes, num_host_blocks=0)
    return KvPool(layout, sizes.num_device_blocks, 0, device), sizes


def _bytes_for_cache(
    described: Description, options: RunnerOptions, decoder: GpuDecoder, layout: KvLayout, device: Device
) -> int:
    """Return the GPU memory that weights, the largest step, the sampler's marks, swapping and the graphs leave."""
    # Return memory that only loading needed.
    torch.cuda.empty_cache()
    spec, block_bytes = decoder.spec, layout.block_bytes
    pool, limit = KvPool(layout, 1, 0, device), options.max_num_batched_tokens
    states = StatePool(spec, 1, device) if spec.recurrences else None
    has_adapters = options.num_adapter_slots > 0
    shapes = GraphShapes(options.max_num_seqs, limit, has_adapters=has_adapters, has_states=states is not None)
    # The measured steps have no decoding rows.
    splits = max(split_bytes(shapes.max_rows, one.num_heads, one.head_dim, FIXED_SPLITS) for one in spec.attentions)
    peak = peak_bytes(decoder, pool, limit, options.max_num_seqs, states) + splits
    graphs = GraphMemory(
        num_graphs=len(shapes.all),
        num_rows=shapes.max_rows,
        logits_width=padded_vocab(spec.vocab_size),
        itemsize=decoder.dtype.itemsize,
        max_blocks=-(-described.max_model_len // options.block_size),
        step_bytes=peak_bytes(decoder, pool, shapes.all[0].num_tokens, shapes.max_rows, states) + splits,
    )
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    marks = 8 * FIRST_ROWS * spec.vocab_size
    num_swapped = num_host_blocks(options, block_bytes, total // block_bytes, _SWAP_GIB)
    staged = layout.num_staged(num_swapped) * block_bytes
    share = options.gpu_memory_utilization or _UTILIZATION
    # One slot is there already.
    of_states = max(0, options.state_slots - 1) * state_bytes(spec)
    taken = peak + marks + staged + of_states + (0 if options.enforce_eager else graphs.num_bytes)
    return bytes_left(total=total, free=free, reserved=reserved, peak=taken, utilization=share)
