"""What blocks of each size waste on a live load: scheduler and memory alone, without a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean

import numpy as np

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.scheduler.budget import StepLimits
from penstock.gpu_node.engine.scheduler.scheduler import LearnedTimes, Scheduler
from penstock.gpu_node.engine.sequence import Sequence as Choice
from penstock.gpu_node.engine.text.output import EndRule

KV_TOKENS = 48_000
MAX_MODEL_LEN = 4096
Load = Sequence[tuple[Sequence[int], int, int]]
"""Prompt, output tokens and choices of each request."""


def block_waste(load: Load, block_size: int) -> float:
    """Run a load to its end. Return the unused share of held blocks, the mean over all steps."""
    memory = KvCacheManager(KV_TOKENS // block_size)
    limits = StepLimits.of(EngineConfig.model_validate({"model": "none", "block_size": block_size}), MAX_MODEL_LEN)
    scheduler = Scheduler(memory, limits, LearnedTimes("recompute", 1))
    for i, (prompt, num_output, n) in enumerate(load):
        scheduler.add(*(_choice(f"{i}", c, prompt, num_output) for c in range(n)))
    return mean(_run(scheduler, memory, block_size))


def _choice(name: str, choice: int, prompt: Sequence[int], num_output: int) -> Choice:
    tokens = np.array(prompt, np.int32)
    rule = EndRule(frozenset(), 0, num_output)
    return Choice(name, choice, SamplingParams(), 0, tokens, len(prompt), rule)


def _run(scheduler: Scheduler, memory: KvCacheManager, block_size: int) -> Iterator[float]:
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(step, np.ones(len(step.sampled), np.int32))
        if room := memory.num_held * block_size:
            yield scheduler.num_tokens_unused / room
