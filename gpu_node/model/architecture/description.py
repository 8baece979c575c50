"""A model before its weights are read: what every runner is built from."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.checkpoint.files import ReadScaled
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.protocol import CacheSizes, RunnerOptions


@dataclass(frozen=True, slots=True)
class Description:
    """A model's files and what is made of them."""

    source: ModelSource
    spec: ModelSpec
    stored_dtype: str
    """What config.json says its numbers are kept in."""
    max_model_len: int
    read_scaled: ReadScaled | None = None
    """Finds the quantised matrices of a checkpoint that has some."""


def cache_sizes(described: Description, options: RunnerOptions, token_bytes: int) -> CacheSizes:
    """Blocks of a CPU runner's KV cache at `token_bytes` for a token in all layers.

    Raises ConfigError for a cache without a block, and for options that only a card's runner can honour.
    """
    if options.gpu_memory_utilization is not None:
        raise ConfigError("gpu_memory_utilization needs a card; on the CPU, kv_cache_gib sizes the KV cache")
    if options.cpu_offload_gib:
        raise ConfigError("cpu_offload_gib needs a card; on the CPU, weights lie in host memory as they are")
    block_bytes = token_bytes * options.block_size
    num_device_blocks = options.num_blocks
    if num_device_blocks is None:
        affordable = int(options.kv_cache_gib * 2**30) // block_bytes
        useful = options.max_num_seqs * -(-described.max_model_len // options.block_size)
        num_device_blocks = min(affordable, useful)
    if num_device_blocks < 1:
        raise ConfigError(f"kv_cache_gib {options.kv_cache_gib} does not hold one block of {options.block_size} tokens")
    return CacheSizes(num_device_blocks, num_host_blocks(options, block_bytes), block_bytes)


def num_host_blocks(options: RunnerOptions, block_bytes: int) -> int:
    """Blocks of the host pool, by number or by size."""
    if options.num_host_blocks is not None:
        return options.num_host_blocks
    return int(options.swap_space_gib * 2**30) // block_bytes
