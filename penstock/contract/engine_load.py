"""The part of an engine's statistics that its node reports with every heartbeat."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """KV blocks, sequences and steps of an engine. Counters grow from its start.

    Times cover the last few hundred steps. A step's time runs from its submission until its tokens are committed.
    """

    block_size: int = 16
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    """Device blocks that no sequence holds, cached prefixes included."""
    kv_blocks_cached: int = 0
    kv_tokens_used: int = 0
    """Tokens stored in held blocks; shared blocks count once. The difference to those blocks' size is fragmentation."""
    kv_evictions: int = 0
    """Cached prefix blocks that the device evicted. The host keeps a copy of each while it has free blocks."""
    prefill_tokens: int = 0
    """Prompt tokens computed, recomputed ones included."""
    decode_tokens: int = 0
    """Tokens that were sampled, without rejected drafts."""
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    """Preemptions that swapped their blocks to host memory; after the others, the KV cache is recomputed."""
    num_swapped: int = 0
    """Preempted sequences with their blocks on the host."""
    swap_blocks_total: int = 0
    swap_blocks_free: int = 0
    """Host blocks that no sequence holds, cached prefixes included."""
    swap_blocks_cached: int = 0
    swap_evictions: int = 0
    """Cached prefix blocks that the host evicted."""
    swapped_out_blocks: int = 0
    """Blocks copied from the device to the host: of preempted sequences and of evicted prefixes."""
    swapped_in_blocks: int = 0
    prefix_lookup_tokens: int = 0
    """Tokens of all sequences that were admitted without blocks of their own."""
    prefix_hit_tokens: int = 0
    """The tokens among `prefix_lookup_tokens` that were found in the prefix cache, on device and host."""
    swap_hit_tokens: int = 0
    """The tokens among `prefix_hit_tokens` that were found on the host."""
    drafted_tokens: int = 0
    """Drafted tokens that were computed."""
    accepted_tokens: int = 0
    """Drafted tokens that were accepted."""
    step_ms_p50: float = 0.0
    step_ms_p99: float = 0.0
    num_failed_steps: int = 0
    num_memory_failures: int = 0
    """Failed steps that ran out of memory."""
    max_step_tokens: int = 0
    """Largest number of tokens in a step; below the configured limit after a step ran out of memory."""
    process_bytes: int = 0
    """Physical memory of the engine's process."""
    arithmetic: str = ""
    """The runner and the formats of weights and KV cache with which it computes."""
