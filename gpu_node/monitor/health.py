"""Which part of a node is not well, and why: what is seen of its parts at every beat becomes one line for each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.gpu_node.engine.records import EngineStats

log = logging.getLogger(__name__)

REMEMBERED_S = 30.0
"""What was wrong for a moment is told for so long, so that somebody sees it."""
_STALLED_ENGINE_S = 10.0
_SILENT_REDIS_S = 5.0
_LATE_S = 1.0
_JUMP_S = 1.0
_THRASH_SHARE = 0.2
_THRASH_STEPS = 20


@dataclass(frozen=True, slots=True)
class HealthSample:
    """What is seen of a node at one moment; counters grow from its start."""

    now_s: float
    """Monotonic."""
    wall_s: float
    """What the machine's clock says."""
    late_s: float
    """How much later than it wanted to the event loop came to look."""
    stats: EngineStats
    engine_stalled_s: float
    """Time without an answer, or without a step though there is work."""
    redis_silent_s: float
    hears_doorbell: bool
    unsent_bytes: int
    max_unsent_bytes: int
    num_tokenizer_failures: int


class Health:
    """Judges signs against those of the look before; logs what changes."""

    def __init__(self) -> None:
        self._before: HealthSample | None = None
        self._max_step_tokens = 0
        self._troubles: dict[str, tuple[str, float]] = {}

    def look(self, signs: HealthSample) -> dict[str, str]:
        """The parts that are not well, and why."""
        before, self._before = self._before or signs, signs
        self._max_step_tokens = max(self._max_step_tokens, signs.stats.max_step_tokens)
        for part, why in self._found(signs, before):
            if part not in self._troubles:
                log.warning("a part is not well", extra={"part": part, "reason": why})
            self._troubles[part] = why, signs.now_s
        for part in [part for part, (_, seen_s) in self._troubles.items() if signs.now_s - seen_s > REMEMBERED_S]:
            del self._troubles[part]
            log.info("a part is well again", extra={"part": part})
        return {part: why for part, (why, _) in self._troubles.items()}

    def _found(self, signs: HealthSample, before: HealthSample) -> Iterator[tuple[str, str]]:
        yield from _of_process(signs, before)
        yield from _of_queue(signs)
        yield from self._of_engine(signs, before)

    def _of_engine(self, signs: HealthSample, before: HealthSample) -> Iterator[tuple[str, str]]:
        stats, last = signs.stats, before.stats
        if signs.engine_stalled_s > _STALLED_ENGINE_S:
            yield "engine", f"has made no step for {signs.engine_stalled_s:.0f} s"
        num_without_memory = stats.num_memory_failures - last.num_memory_failures
        num_failed = stats.num_failed_steps - last.num_failed_steps - num_without_memory
        if num_failed > 0:
            yield "runner", f"{num_failed} steps failed"
        num_steps, num_preempted = stats.steps - last.steps, stats.num_preemptions - last.num_preemptions
        if num_without_memory > 0:
            yield "memory", f"{num_without_memory} steps found none"
        elif stats.max_step_tokens < self._max_step_tokens:
            yield "memory", f"steps are held to {stats.max_step_tokens} of {self._max_step_tokens} tokens"
        elif num_steps >= _THRASH_STEPS and num_preempted > _THRASH_SHARE * num_steps:
            yield "memory", f"sequences gave up their blocks {num_preempted} times in {num_steps} steps"


def _of_process(signs: HealthSample, before: HealthSample) -> Iterator[tuple[str, str]]:
    if signs.late_s > _LATE_S:
        yield "loop", f"was held up for {signs.late_s:.1f} s"
    jump_s = (signs.wall_s - before.wall_s) - (signs.now_s - before.now_s)
    if abs(jump_s) > _JUMP_S:
        yield "clock", f"jumped by {jump_s:+.1f} s"
    num_failures = signs.num_tokenizer_failures - before.num_tokenizer_failures
    if num_failures > 0:
        yield "tokenizer", f"failed at {num_failures} prompts"


def _of_queue(signs: HealthSample) -> Iterator[tuple[str, str]]:
    if signs.redis_silent_s > _SILENT_REDIS_S:
        yield "redis", f"has not answered for {signs.redis_silent_s:.0f} s"
    if not signs.hears_doorbell:
        yield "doorbell", "the subscription is cut: new jobs are found by looking"
    if 2 * signs.unsent_bytes > signs.max_unsent_bytes:
        waiting, most = signs.unsent_bytes >> 10, signs.max_unsent_bytes >> 10
        yield "outbox", f"{waiting} of {most} KiB wait for Redis"
