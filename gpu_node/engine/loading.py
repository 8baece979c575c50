"""From an engine's settings to a model and its runner."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.model.protocol import LoadedModel, RunnerOptions


def load(config: EngineConfig, progress: Callable[[str, float], None]) -> LoadedModel:
    """Load the model that `config` names. Raises ConfigError."""
    # A thread that spins at an OpenMP barrier keeps the processor from the one it waits for: where other processes run
    # too, steps were seen to take 6 times as long; one that sleeps at once costs 40 % of an idle machine's speed. A
    # short spin (about 20 µs) has neither fault. The runtime reads this when torch is loaded for the first time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # One prompt gains nothing by the tokenizer's own team of threads, and a process that has one cannot fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Only here does torch come in: whoever imports the engine for its records does not pay for it.
    from penstock.gpu_node.model.load import load_model

    options = RunnerOptions(
        runner=config.runner,
        dtype=config.dtype,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        num_blocks=config.wanted_blocks,
        kv_cache_gib=config.kv_cache_gib,
        num_host_blocks=config.num_swap_blocks,
        swap_space_gib=config.swap_space_gib,
        gpu_memory_utilization=config.gpu_memory_utilization,
        cpu_offload_gib=config.cpu_offload_gib,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        deterministic=config.deterministic,
        num_threads=config.num_threads,
        reserved_cores=config.reserved_cores,
        weight_cache=config.weight_cache,
        lora=config.lora,
        lora_dir=config.lora_dir,
        max_loras=config.num_adapter_places,
        max_lora_rank=config.max_lora_rank,
    )
    # On a thread that ends: torch keeps a team of its own for every thread that lives, and teams that are more than the
    # cores stop spinning at their barriers, which costs a step 40 % of its speed.
    with ThreadPoolExecutor(1, "penstock-load") as loader:
        return loader.submit(load_model, config.model, options, progress, revision=config.revision).result()
