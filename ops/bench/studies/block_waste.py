"""What blocks of each size waste on a live load, and where: scheduler and memory alone, without a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Waste:
    """Means over all steps; shares are of the capacity of held blocks, in tokens."""

    of_all: float
    in_last_blocks: float
    """Behind the last token of each sequence, in the block that it fills: what no paging can avoid."""
    tokens_a_sequence: float


def block_waste(load: Load, block_size: int) -> Waste:
    """Runs a load to its end."""
    memory = KvCacheManager(KV_TOKENS // block_size)
    limits = StepLimits.of(EngineConfig.model_validate({"model": "none", "block_size": block_size}), MAX_MODEL_LEN)
    scheduler = Scheduler(memory, limits, LearnedTimes("recompute", 1))
    for i, (prompt, num_output, n) in enumerate(load):
        scheduler.add(*(_choice(f"{i}", c, prompt, num_output) for c in range(n)))
    wastes = list(_run(scheduler, memory, block_size))
    return Waste(*(mean(values) for values in zip(*wastes, strict=True)))


def _choice(name: str, choice: int, prompt: Sequence[int], num_output: int) -> Choice:
    tokens = np.array(prompt, np.int32)
    rule = EndRule(frozenset(), 0, num_output)
    return Choice(name, choice, SamplingParams(), 0, tokens, len(prompt), rule)


def _run(scheduler: Scheduler, memory: KvCacheManager, block_size: int) -> Iterator[tuple[float, float, float]]:
    while (step := scheduler.schedule()) is not None:
        ends = dict(zip(step.seqs, step.ends.tolist(), strict=True))
        scheduler.commit(step, np.ones(len(step.sampled), np.int32))
        room = memory.num_held * block_size
        if room:
            # One that the step did not serve, or that shares its last block still, is not counted here.
            own = [ends[seq] for seq in scheduler.running if seq in ends and seq.spare is None]
            in_last = sum(-end % block_size for end in own)
            unused = scheduler.num_tokens_unused
            yield unused / room, in_last / room, (room - unused) / scheduler.num_running
