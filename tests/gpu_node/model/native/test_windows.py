"""Layers with windows that keep only their windows: the same numbers to the bit, and a fraction of the memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.prompts import mixed_prompts
from fakes.runners.runner_options import runner_options
from fakes.schedules import new_sequence

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.kv_cache.windows import WindowCache
from penstock.gpu_node.engine.scheduler.budget import StepLimits
from penstock.gpu_node.engine.scheduler.scheduler import LearnedTimes, Scheduler
from penstock.gpu_node.model.architecture.families import family_of
from penstock.gpu_node.model.checkpoint.description import cache_sizes
from penstock.gpu_node.model.native.ranks import RankPlace
from penstock.gpu_node.model.native.shapes import token_bytes_of, windowed_tokens_of
from penstock.gpu_node.model.protocol import CacheSizes

Family = Callable[..., Path]
GEMMA_3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262_144,
}


def _sizes(*, max_model_len: int = 32_768, **options: Any) -> tuple[CacheSizes, int]:
    """Return the blocks of a Gemma 3 1B, and the bytes of a token over all layers."""
    spec, wanted = (
        family_of(GEMMA_3_1B).spec_of(GEMMA_3_1B),
        runner_options(runner="native", num_kv_blocks=None, **options),
    )
    token_bytes = token_bytes_of(spec, "auto", RankPlace())
    return cache_sizes(max_model_len, wanted, token_bytes, windowed_tokens_of(spec, wanted)), token_bytes


def test_a_text_of_16000_tokens_holds_a_quarter_of_what_all_layers_would_keep() -> None:
    sizes, token_bytes = _sizes(max_num_seqs=64, max_num_batched_tokens=512, kv_cache_gib=2.0)
    windows = WindowCache(sizes.windows, 16)
    memory = KvCacheManager(sizes.num_device_blocks, windows=windows)
    limits = StepLimits(
        block_size=16, max_num_seqs=64, max_num_batched_tokens=512, max_prefill_beside_decode=512, max_model_len=32_768
    )
    scheduler = Scheduler(memory, limits, LearnedTimes("recompute", 1))
    seq = new_sequence("long", 16_000, 2)
    scheduler.add(seq)
    shares = []
    while (step := scheduler.schedule()) is not None:
        held = memory.num_held * sizes.block_bytes
        held += (windows.pool.num_total - windows.pool.num_free) * sizes.windows.block_bytes
        shares.append(held / (int(step.ends[0]) * token_bytes))
        scheduler.commit(step, step.sampled * 0 + 1000)
    # The last step of the prompt, which also has its own tokens in the windowed layers; then one of decoding.
    assert shares[-2] < 0.22 and shares[-1] < 0.19


def test_memory_is_divided_so_that_more_tokens_fit_than_without() -> None:
    for gib, num_seqs in ((1.0, 64), (1.0, 8), (4.0, 64), (0.2, 64)):
        sizes, token_bytes = _sizes(kv_cache_gib=gib, max_num_seqs=num_seqs, max_num_batched_tokens=512)
        assert sizes.num_device_blocks * sizes.block_bytes + sizes.windows.num_bytes <= gib * 2**30
        assert sizes.num_device_blocks * 16 * token_bytes > 1.3 * gib * 2**30
        of_sequence = -(-(512 + 63) // 16) + 1
        assert of_sequence + 32 <= sizes.windows.num_blocks <= num_seqs * of_sequence + 32


def test_windows_have_no_blocks_of_their_own_where_that_saves_nothing() -> None:
    for options in (
        {"max_model_len": 512, "kv_cache_gib": 1.0, "max_num_seqs": 64},
        {"kv_cache_gib": 0.01, "max_num_seqs": 64},
        {"kv_cache_gib": 1.0, "max_num_seqs": 8, "tensor_parallel_size": 2},
    ):
        sizes, token_bytes = _sizes(max_num_batched_tokens=512, **options)
        assert not sizes.windows.num_blocks and sizes.block_bytes == 16 * token_bytes


NAMES = ("gemma2", "gemma3", "gpt-oss", "gemma4")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
def test_the_same_numbers_to_the_bit_with_blocks_of_their_own(
    family: Family, best_library: Path, name: str, kv_cache_dtype: str
) -> None:
    plain: dict[str, Any] = {
        "model": str(family(name)),
        "runner": "native",
        "dtype": "bfloat16",
        "kv_cache_dtype": kv_cache_dtype,
        "weight_cache": False,
        "max_num_batched_tokens": 96,
        "max_model_len": 384,
    }
    drawn, forked = (
        SamplingParams(temperature=1.0, max_tokens=60, seed=5, n=n, ignore_eos=True, logprobs=2) for n in (1, 3)
    )
    said, stats = [], []
    for limits in (
        {"num_kv_blocks": 600, "max_num_seqs": 96, "num_threads": 1, "enable_prefix_caching": False},
        {"num_kv_blocks": 120, "max_num_seqs": 12, "num_threads": 2, "num_swap_blocks": 100, "preemption": "swap"},
    ):
        engine = Engine(EngineConfig(**plain | limits))
        prompts = [prompt[:250] for prompt in mixed_prompts(engine, 14)]
        turns = [engine.generate(prompts, drawn), engine.generate(prompts[:5], forked)]
        again = [[*one.prompt_token_ids, *one.choices[0].token_ids] for one in turns[0]]
        turns.append(engine.generate(again, drawn))
        said.append([[(c.token_ids, c.logprobs) for c in one.choices] for turn in turns for one in turn])
        stats.append(engine.stats())
        engine.check_integrity()
    assert not stats[0].window_blocks_total and stats[1].window_blocks_total == 12 * 7 + 6
    assert stats[1].num_preemptions > 0 and stats[1].prefix_hit_tokens > 0 and stats[1].window_evictions > 0
    assert said[0] == said[1]
