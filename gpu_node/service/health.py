"""Health of a node's parts. Each heartbeat compares its sample with the one before, and names the unhealthy parts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from penstock.contract.errors import InvariantError, UnavailableError
from penstock.contract.pool import RANKS_PART, SCRIPTS_PART, STOPPING_PARTS
from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.engine.worker import EngineWorker

log = logging.getLogger(__package__)


_INTERVALS_A_LOOK = 3
"""Longest time between two looks at the engine: its answer, the heartbeat and the pause each take one interval."""


_RANKS_LOOK_S = 0.25
"""A node tells within this time that its ranks are lost, or live again: gateways should not wait for a heartbeat."""


class EngineWatch:
    """Looks at an engine every `interval_s` seconds, and waits no longer than that for its answer."""

    def __init__(self, worker: EngineWorker, *, interval_s: float, stall_after_s: float) -> None:
        self._worker = worker
        self._interval_s = interval_s
        self._watchdog = Watchdog(
            stall_after_s=stall_after_s, max_look_s=_INTERVALS_A_LOOK * interval_s, now_s=time.monotonic()
        )
        self.stats: EngineStats | None = None
        """The engine's last statistics; None before the first."""
        self.lost_ranks = ""
        """Why the engine waits for its ranks to be started again, as known at the last look; empty while all live."""

    @property
    def stalled_s(self) -> float:
        """Seconds without progress, as known at the last look."""
        return self._watchdog.stalled_s

    async def look(self) -> EngineStats:
        """Return the engine's statistics; the last known ones while a long step blocks it, so that heartbeats go on.

        Raises UnavailableError before the first ones, EngineStalledError if the engine hangs.
        """
        if (answer := await self._answer()) is not None:
            self.stats = answer
        self.lost_ranks = self._worker.ranks.lost
        may_step = not (self._worker.is_paused or self._worker.is_held)
        self._watchdog.look(answer, may_step=may_step, now_s=time.monotonic(), starts_ranks=bool(self.lost_ranks))
        if self.stats is None:
            # Logged here, because joining retries silently on UnavailableError, as while Redis is unavailable.
            log.warning("the engine has not answered yet", extra={"waited_s": round(self.stalled_s, 1)})
            raise UnavailableError("the engine has not answered yet")
        return self.stats

    async def pause(self, seconds: float) -> None:
        """Wait for so long, or until a look would find that ranks are lost, or that they live again."""
        one_look_s = _RANKS_LOOK_S if self._worker.ranks.num_ranks > 1 else seconds
        left_s = seconds
        while left_s > 0 and bool(self._worker.ranks.lost) == bool(self.lost_ranks):
            await asyncio.sleep(min(left_s, one_look_s))
            left_s -= one_look_s

    async def _answer(self) -> EngineStats | None:
        """Return the engine's statistics; None if it takes longer than an interval, or while it starts its ranks."""
        asked, ends_s = asyncio.wrap_future(self._worker.stats()), time.monotonic() + self._interval_s
        try:
            while not self._worker.ranks.lost and (left_s := ends_s - time.monotonic()) > 0:
                await asyncio.wait([asked], timeout=min(left_s, _RANKS_LOOK_S))
                if asked.done():
                    return asked.result()
            return None
        finally:
            asked.cancel()


class EngineStalledError(InvariantError):
    """The engine hangs. Its node must end, so that other nodes take over its jobs."""

    code = "engine_stalled"


class Watchdog:
    """The time that an engine has made no progress: it does not answer, or it has work and its step count stands still.

    A look may be late because the whole process was paused. Such an interval counts for at most `max_look_s`.
    """

    def __init__(self, *, stall_after_s: float, max_look_s: float, now_s: float) -> None:
        self._stall_after_s = stall_after_s
        self._max_look_s = max_look_s
        self._looked_s = now_s
        self._num_steps = -1
        self.stalled_s = 0.0
        """Seconds without progress, as known at the last look."""

    def look(self, stats: EngineStats | None, *, may_step: bool, now_s: float, starts_ranks: bool = False) -> None:
        """Check the engine's statistics; None: it did not answer. Raises EngineStalledError when it hangs.

        starts_ranks: it waits for its ranks. That has a limit of its own: a large model may take longer to load than a
        step may take.

        A node that only seemed to live would keep its jobs forever.
        """
        elapsed_s = min(now_s - self._looked_s, self._max_look_s)
        self._looked_s = now_s
        if starts_ranks:
            self.stalled_s = 0.0
            return
        if stats is not None:
            has_work = stats.num_running + stats.num_waiting + stats.num_swapped > 0
            if stats.steps != self._num_steps or not may_step or not has_work:
                self._num_steps, self.stalled_s = stats.steps, 0.0
                return
        self.stalled_s += elapsed_s
        if self.stalled_s > self._stall_after_s:
            raise EngineStalledError(f"the engine has work and has made no step for {self.stalled_s:.0f} s")


REMEMBERED_S = 30.0
"""How long a past problem stays reported as past, so that an operator can notice it."""
_NOT_REMEMBERED = STOPPING_PARTS
"""Gateways are not ready while such a part is unhealthy, so it is reported for no longer than that."""
_STALLED_ENGINE_S = 10.0
_SILENT_REDIS_S = 5.0
_LATE_S = 1.0
_JUMP_S = 1.0
_THRASH_SHARE = 0.2
_THRASH_STEPS = 20


@dataclass(frozen=True, slots=True)
class HealthSample:
    """Measurements of a node at one moment. Counters grow from the node's start."""

    now_s: float
    """Monotonic clock."""
    wall_s: float
    """The machine's wall clock."""
    late_s: float
    """Delay of the event loop: how much later than scheduled it woke up."""
    stats: EngineStats
    engine_stalled_s: float
    """Seconds without an answer, or without a step although there is work."""
    lost_ranks: str
    """Why the engine waits for its ranks to be started again; empty while all live."""
    redis_silent_s: float
    hears_doorbell: bool
    unsent_bytes: int
    max_unsent_bytes: int
    failing: str
    """Why Redis refused the last call of a part of this node; empty while it refuses none."""
    num_tokenizer_failures: int


class Health:
    """The health of a node's parts, from each sample and the one before it. Changes are logged."""

    def __init__(self) -> None:
        self._before: HealthSample | None = None
        self._max_step_tokens = 0
        # Keyed by id: part of the node.
        self._troubles: dict[str, tuple[str, float]] = {}
        # Keyed by id: part of the node.
        self.past: dict[str, str] = {}

    def look(self, sample: HealthSample) -> dict[str, str]:
        """Return the parts that are unhealthy now, each with the reason. `past` then has those that were so before."""
        before, self._before = self._before or sample, sample
        self._max_step_tokens = max(self._max_step_tokens, sample.stats.max_step_tokens)
        found = chain(_of_process(sample, before), _of_queue(sample), self._of_engine(sample, before))
        now = dict(found)
        for part, why in now.items():
            if part not in self._troubles:
                log.warning("a part of this node is unhealthy", extra={"part": part, "reason": why})
            self._troubles[part] = why, sample.now_s
        for part, (_, seen_s) in list(self._troubles.items()):
            if sample.now_s - seen_s <= (0.0 if part in _NOT_REMEMBERED else REMEMBERED_S):
                continue
            del self._troubles[part]
            log.info("a part of this node is healthy again", extra={"part": part})
        self.past = {part: why for part, (why, _) in self._troubles.items() if part not in now}
        return now

    def _of_engine(self, sample: HealthSample, before: HealthSample) -> Iterator[tuple[str, str]]:
        stats, last = sample.stats, before.stats
        if sample.engine_stalled_s > _STALLED_ENGINE_S:
            yield "engine", f"has made no step for {sample.engine_stalled_s:.0f} s"
        if sample.lost_ranks:
            yield RANKS_PART, f"are being started again: {sample.lost_ranks}"
        if stats.grammar_host_failures:
            yield "grammars", "requests with structured output fail until the node is restarted"
        num_without_memory = stats.num_memory_failures - last.num_memory_failures
        num_failed = stats.num_failed_steps - last.num_failed_steps - num_without_memory
        if num_failed > 0:
            yield "runner", f"{num_failed} steps failed"
        num_steps, num_preempted = stats.steps - last.steps, stats.num_preemptions - last.num_preemptions
        if num_without_memory > 0:
            yield "memory", f"{num_without_memory} steps ran out of memory"
        elif stats.max_step_tokens < self._max_step_tokens:
            yield "memory", f"steps are limited to {stats.max_step_tokens} of {self._max_step_tokens} tokens"
        elif num_steps >= _THRASH_STEPS and num_preempted > _THRASH_SHARE * num_steps:
            yield "memory", f"{num_preempted} preemptions in {num_steps} steps"


def _of_process(sample: HealthSample, before: HealthSample) -> Iterator[tuple[str, str]]:
    if sample.late_s > _LATE_S:
        yield "loop", f"was blocked for {sample.late_s:.1f} s"
    jump_s = (sample.wall_s - before.wall_s) - (sample.now_s - before.now_s)
    if abs(jump_s) > _JUMP_S:
        yield "clock", f"jumped by {jump_s:+.1f} s"
    num_failures = sample.num_tokenizer_failures - before.num_tokenizer_failures
    if num_failures > 0:
        yield "tokenizer", f"failed at {num_failures} prompts"


def _of_queue(sample: HealthSample) -> Iterator[tuple[str, str]]:
    if sample.redis_silent_s > _SILENT_REDIS_S:
        yield "redis", f"has not answered for {sample.redis_silent_s:.0f} s"
    if sample.failing:
        yield SCRIPTS_PART, f"redis refused a call: {sample.failing}"
    if not sample.hears_doorbell:
        yield "doorbell", "the subscription is lost: new jobs are found by polling"
    if 2 * sample.unsent_bytes > sample.max_unsent_bytes:
        unsent, limit = sample.unsent_bytes >> 10, sample.max_unsent_bytes >> 10
        yield "outbox", f"{unsent} of {limit} KiB wait for Redis"
