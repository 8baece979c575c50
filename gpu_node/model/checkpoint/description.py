"""The description of a model before its weights are read; every runner is built from it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.checkpoint.stored_tensors import Checkpoint, ReadScaled
from penstock.gpu_node.model.options import DEFAULT_KV_CACHE_GIB, RunnerOptions
from penstock.gpu_node.model.protocol import CacheSizes
from penstock.kernels.cpu.probe import available_bytes

SWAP_SHARE = 0.25
"""Share of the free memory that the default of the swap space may take."""


@dataclass(frozen=True, slots=True)
class Description:
    """A model's files, and the spec and options read from them."""

    source: ModelSource
    architecture: str
    """The architecture that config.json names."""
    spec: ModelSpec
    stored_dtype: str
    """The dtype of the checkpoint as config.json states it."""
    max_model_len: int
    read_scaled: ReadScaled | None = None
    """Reads the quantized matrices of a quantized checkpoint; None for other checkpoints."""
    gguf: GgufFile | None = None
    """The source's GGUF file, if it is open."""

    def open_checkpoint(self) -> Checkpoint:
        """Map the weight files. Raises ConfigError for files that are missing, truncated or invalid."""
        return Checkpoint.open(self.source, self.read_scaled, self.gguf)


def cache_sizes(described: Description, options: RunnerOptions, token_bytes: int) -> CacheSizes:
    """Return the number of KV blocks of a CPU runner; `token_bytes` is the size of one token over all layers.

    Raises ConfigError if kv_cache_gib does not hold one block, and for options that only the GPU runner supports.
    """
    if options.gpu_memory_utilization is not None:
        raise ConfigError("gpu_memory_utilization needs a GPU; on the CPU, kv_cache_gib sizes the KV cache")
    if options.cpu_offload_gib:
        raise ConfigError("cpu_offload_gib needs a GPU; on the CPU, all weights are in host memory already")
    block_bytes, kv_cache_gib = token_bytes * options.block_size, options.kv_cache_gib or DEFAULT_KV_CACHE_GIB
    num_device_blocks = options.wanted_blocks
    if num_device_blocks is None:
        affordable = int(kv_cache_gib * 2**30) // block_bytes
        useful = options.max_num_seqs * -(-described.max_model_len // options.block_size)
        num_device_blocks = min(affordable, useful)
    if num_device_blocks < 1:
        raise ConfigError(f"kv_cache_gib {kv_cache_gib} does not hold one block of {options.block_size} tokens")
    num_swapped = num_host_blocks(options, block_bytes, num_device_blocks)
    return CacheSizes(num_device_blocks, num_swapped, block_bytes)


def num_host_blocks(options: RunnerOptions, block_bytes: int, num_device_blocks: int, default_gib: float = 0.0) -> int:
    """Return the number of KV blocks in host memory, from num_swap_blocks, else from swap_space_gib, else a default.

    An operator who sets the size of the KV cache decides about the node's memory, so there is no default beside that.
    """
    if options.num_swap_blocks is not None:
        return options.num_swap_blocks
    if options.swap_space_gib is not None:
        return int(options.swap_space_gib * 2**30) // block_bytes
    if options.kv_cache_gib is not None or options.wanted_blocks is not None:
        return 0
    return min(num_device_blocks, int(min(default_gib * 2**30, available_bytes() * SWAP_SHARE)) // block_bytes)
