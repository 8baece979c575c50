"""The snapshot of an engine's statistics."""

from __future__ import annotations

from dataclasses import asdict

from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.engine.scheduler.scheduler import Scheduler
from penstock.gpu_node.engine.search.searches import SharedBlocks
from penstock.gpu_node.engine.structured.lanes import GrammarCounts
from penstock.gpu_node.engine.timings import StepTimings
from penstock.gpu_node.model.protocol import NO_RANKS, LoadedModel, RecoverableRunner
from penstock.runtime.process_memory import resident_bytes


def engine_stats(
    memory: KvCacheManager,
    scheduler: Scheduler,
    timings: StepTimings,
    grammars: GrammarCounts,
    model: LoadedModel,
    block_size: int,
    shared: SharedBlocks,
) -> EngineStats:
    """Return a snapshot of memory, queues and counters."""
    device, host, hits = memory.device, memory.host, scheduler.prefix_hits
    ranks = model.runner.ranks if isinstance(model.runner, RecoverableRunner) else NO_RANKS
    return EngineStats(
        kv_blocks_total=device.num_total,
        kv_blocks_free=device.num_free,
        kv_blocks_cached=device.num_cached,
        kv_evictions=device.num_evictions,
        block_size=block_size,
        num_running=scheduler.num_running,
        num_waiting=scheduler.queues.num_waiting,
        num_preemptions=scheduler.num_preemptions,
        prefix_lookup_tokens=hits.lookup_tokens,
        prefix_hit_tokens=hits.hit_tokens,
        swap_hit_tokens=hits.host_tokens,
        kv_tokens_used=memory.num_held * block_size - scheduler.num_tokens_unused,
        swap_blocks_total=host.num_total,
        swap_blocks_free=host.num_free,
        swap_blocks_cached=host.num_cached,
        swap_evictions=host.num_evictions,
        swapped_out_blocks=memory.num_out,
        swapped_in_blocks=memory.num_in,
        search_blocks_needed=shared.needed,
        search_blocks_held=shared.held,
        num_swapped=len(scheduler.queues.swapped),
        num_swaps=scheduler.num_swaps,
        drafted_tokens=scheduler.drafts.num_drafted,
        accepted_tokens=scheduler.drafts.num_accepted,
        max_step_tokens=scheduler.max_step_tokens,
        process_bytes=resident_bytes(),
        kind_seconds=scheduler.background.engine_time.seconds,
        level_seconds=scheduler.background.engine_time.level_seconds,
        step_costs_ms=scheduler.background.engine_time.step_costs_ms,
        background_held_back=scheduler.background.num_held_back,
        background_due=scheduler.background.is_due,
        arithmetic=model.arithmetic,
        block_bytes=model.runner.cache_sizes.block_bytes,
        weight_bytes=model.runner.placement.weight_bytes,
        gpu_uuid=model.runner.placement.gpu_uuid,
        ranks=ranks,
        num_ranks=ranks.num_ranks,
        num_rank_losses=max(0, ranks.num_starts - 1),
        **timings.stats(),
        **asdict(grammars),
    )
