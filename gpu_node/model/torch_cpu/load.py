"""Build the torch runner for a described model."""

from __future__ import annotations

import logging

import torch

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.rank_part import RankPart
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.checkpoint.description import Description, cache_sizes
from penstock.gpu_node.model.checkpoint.source import Progress
from penstock.gpu_node.model.checkpoint.tensors import RankTensors
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.protocol import CacheSizes
from penstock.gpu_node.model.torch_common.exchanges import Exchanges
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory
from penstock.gpu_node.model.torch_common.positions import alibi_biases
from penstock.gpu_node.model.torch_common.ranks import ALONE, RankLinks
from penstock.gpu_node.model.torch_cpu.attention import PagedAttention
from penstock.gpu_node.model.torch_cpu.decoder import Decoder
from penstock.gpu_node.model.torch_cpu.runner import TorchRunner
from penstock.gpu_node.model.torch_cpu.weights import can_prepack, map_weights
from penstock.kernels.cpu.probe import usable_cores

log = logging.getLogger(__package__)


_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def fixed_options(described: Description, options: RunnerOptions) -> RunnerOptions:
    """Return the options with what this machine decides: all ranks of a model must have the same type and blocks."""
    name = _choose_dtype(options.dtype, described.stored_dtype)
    sizes = cache_sizes(described, options, _token_bytes(described.spec, _DTYPES[name]))
    blocks = {"num_kv_blocks": sizes.num_device_blocks, "num_swap_blocks": sizes.num_host_blocks}
    return options.model_copy(update={"dtype": name, **blocks})


def _token_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize


@translate_out_of_memory()
def load_torch(
    described: Description, options: RunnerOptions, progress: Progress, links: RankLinks = ALONE
) -> tuple[TorchRunner, str]:
    """Return the runner of a rank, and the name of its arithmetic, which does not depend on the number of ranks.

    Raises ConfigError for a missing or unsupported feature.
    """
    if options.quantization not in ("auto", "none"):
        supported = (
            "runner torch has auto and none, the native runner has int8, int8_group and int4, a GPU int8, int4, fp8"
        )
        raise ConfigError(f"quantization {options.quantization} is not supported: {supported}")
    wanted, found = (
        (options.tensor_parallel_size, options.pipeline_parallel_size),
        (links.tensor.size, links.num_stages),
    )
    if wanted != found:
        raise ConfigError(f"tensor_parallel_size and pipeline_parallel_size are {wanted}, but the ranks joined {found}")
    _set_threads(options, links.num_here)
    whole, name = described.spec, _choose_dtype(options.dtype, described.stored_dtype)
    part = RankPart(whole, links.tensor.rank, links.tensor.size, links.stage, links.num_stages)
    spec, dtype = part.spec, _DTYPES[name]
    if options.kv_cache_dtype not in ("auto", name):
        supported = f"runner torch has {name}, the native runner has bfloat16 and int8"
        raise ConfigError(f"kv_cache_dtype {options.kv_cache_dtype} is not supported: {supported}")
    report, is_lazy = (lambda done: progress("load", done)), described.read_scaled is None
    weights = map_weights(RankTensors(described.open_checkpoint(), part), part, dtype, report, is_lazy=is_lazy)
    # The cache of all ranks, so that its size means the same whatever their number.
    sizes = cache_sizes(described, options, _token_bytes(spec, dtype) * whole.num_layers // spec.num_layers * part.size)
    largest = options.max_num_batched_tokens * max(spec.hidden_size, 0 if spec.experts is None else spec.experts.count)
    decoder = Decoder(part, weights, described.max_model_len, Exchanges(links, largest))
    runner = TorchRunner(
        part,
        decoder,
        _attention(described, options, part, sizes, dtype),
        sizes,
        block_size=options.block_size,
        dtype=dtype,
    )
    facts = {"dtype": name, "is_prepacked": can_prepack(dtype), "num_threads": torch.get_num_threads()}
    facts |= {"num_kv_blocks": sizes.num_device_blocks, "num_swap_blocks": sizes.num_host_blocks}
    log.info("torch runner", extra=facts | {"rank": links.world.rank, "num_ranks": links.world.size})
    if torch.cuda.is_available():
        log.warning("a CUDA device is visible, but this runner computes on the CPU")
    return runner, f"torch-{name}"


def _set_threads(options: RunnerOptions, num_ranks: int) -> None:
    # torch respects the CPU affinity, but not the CPU quota of a container.
    limit = max(1, usable_cores() - options.reserved_cores)
    num_threads = options.num_threads or min(torch.get_num_threads(), limit)
    torch.set_num_threads(max(1, num_threads // num_ranks))


def _attention(
    described: Description, options: RunnerOptions, part: RankPart, sizes: CacheSizes, dtype: torch.dtype
) -> PagedAttention:
    spec, biases = part.spec, None
    if spec.rope is None:
        # ALiBi, in a model without RoPE.
        biases = torch.from_numpy(alibi_biases(part.whole, described.max_model_len)[part.heads.start : part.heads.stop])
    return PagedAttention(
        spec.num_kv_heads,
        sizes.num_blocks,
        options.block_size,
        dtype,
        biases,
        set(spec.windows),
        spec.score_scale,
        spec.score_cap,
    )


def _choose_dtype(wanted: str, stored: str) -> str:
    """Return the requested dtype; with `auto`, bfloat16 if the checkpoint has it and this CPU has AVX512-BF16.

    Otherwise `auto` means float32.
    """
    if wanted != "auto":
        return wanted
    capability = torch.backends.cpu.get_cpu_capability()
    chosen = stored if stored == "bfloat16" and torch.cpu._is_avx512_bf16_supported() else "float32"
    log.info("dtype is chosen", extra={"dtype": chosen, "stored": stored, "cpu": capability})
    return chosen
