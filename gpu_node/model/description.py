"""A model before its weights are read: what every runner is built from."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.protocol import RunnerOptions
from penstock.gpu_node.model.source import ModelSource
from penstock.gpu_node.model.spec import ModelSpec, NameMap


@dataclass(frozen=True, slots=True)
class Description:
    """A model's files, shapes and names."""

    source: ModelSource
    spec: ModelSpec
    names: NameMap
    stored_dtype: str
    """What config.json says its numbers are kept in."""
    max_model_len: int


def kv_blocks(described: Description, options: RunnerOptions, token_bytes: int) -> int:
    """Blocks of the KV cache, without the null block, at `token_bytes` for a token in all layers."""
    if options.num_blocks is not None:
        return options.num_blocks
    affordable = int(options.kv_cache_gib * 2**30) // (token_bytes * options.block_size)
    useful = options.max_num_seqs * -(-described.max_model_len // options.block_size)
    if affordable < 1:
        raise ConfigError(f"kv_cache_gib {options.kv_cache_gib} does not hold one block of {options.block_size} tokens")
    return min(affordable, useful)
