"""The node's heartbeat: each one carries its pressure record; every fifth one compares its jobs with Redis."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import fields, replace

from penstock.contract.errors import UnavailableError
from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.engine_worker import EngineWorker
from penstock.gpu_node.inbox import JobInbox
from penstock.gpu_node.ledger import Ledger
from penstock.gpu_node.monitor.health import Health, HealthSample
from penstock.gpu_node.monitor.watchdog import Watchdog
from penstock.gpu_node.outbox import Outbox
from penstock.queue.broker.node import NodeBroker
from penstock.queue.wire import NodePressure

log = logging.getLogger(__name__)

MAX_INTERVAL_S = 2.0
HEARTBEATS_PER_LEASE = 6
HEARTBEATS_PER_CHECK = 5
"""Every fifth heartbeat compares the ids of all held jobs with Redis."""
_RATE_HALF_LIFE_S = 10.0
_INTERVALS_A_LOOK = 3
"""Longest time between two looks at the engine: its answer, the heartbeat and the pause each take one interval."""
_SHARED_STATS = sorted({field.name for field in fields(NodePressure)} & {field.name for field in fields(EngineStats)})
"""Statistics that a pressure record copies from the engine, under the same names."""


class RateEstimator:
    """A rate per second from a counter: an exponentially fading average.

    With `keeps`, intervals without gain do not count: the rate then means the speed while there is work.
    """

    def __init__(self, now_s: float, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._last_s = now_s
        self._last = 0.0
        self.per_s = 0.0

    def update(self, total: float, now_s: float, *, counts: bool = True) -> float:
        """Add a counter's new value and return the rate. An interval that does not count leaves the rate unchanged."""
        elapsed_s, gained = now_s - self._last_s, total - self._last
        self._last_s, self._last = now_s, total
        if counts and elapsed_s > 0 and (gained > 0 or not self._keeps):
            fade = 0.5 ** (elapsed_s / _RATE_HALF_LIFE_S) if self.per_s else 0.0
            self.per_s = fade * self.per_s + (1 - fade) * gained / elapsed_s
        return self.per_s


class Heartbeat:
    """The sender of a node's heartbeats. It also sweeps the pool, so that every living node notices dead nodes."""

    def __init__(
        self,
        broker: NodeBroker,
        ledger: Ledger,
        worker: EngineWorker,
        inbox: JobInbox,
        outbox: Outbox,
        *,
        base: NodePressure,
        lease_ms: int,
        stall_after_s: float,
    ) -> None:
        self._broker = broker
        self._ledger = ledger
        self._worker = worker
        self._inbox = inbox
        self._outbox = outbox
        self._base = base
        self._interval_s = min(MAX_INTERVAL_S, lease_ms / 1000 / HEARTBEATS_PER_LEASE)
        self._drain, self._prefill, self._decode, self._steps = (RateEstimator(time.monotonic()) for _ in range(4))
        self._preemptions = RateEstimator(time.monotonic(), keeps=False)
        self._num_heartbeats = 0
        self.engine_stats: EngineStats | None = None
        """The engine's last statistics; None before the first."""
        self._watchdog = Watchdog(
            stall_after_s=stall_after_s, max_look_s=_INTERVALS_A_LOOK * self._interval_s, now_s=time.monotonic()
        )
        self._acknowledged_s, self._late_s = time.monotonic(), 0.0
        self._attempted_s = time.monotonic()
        self._health = Health()
        self.draining = False

    async def run(self) -> None:
        """Send heartbeats until canceled. Raises LeaseLostError if the pool declared this node dead."""
        while True:
            try:
                await self.send()
                await self._broker.sweep()
            except UnavailableError as error:
                log.warning("redis is away", extra={"reason": error.message})
            self._attempted_s = time.monotonic()
            wake_s = self._attempted_s + self._interval_s
            await asyncio.sleep(self._interval_s)
            self._late_s = time.monotonic() - wake_s

    def state(self) -> dict[str, float | bool]:
        """Return the state for health checks: times in seconds, since the last attempt and the last success to send."""
        now_s = time.monotonic()
        return {
            "heartbeat_age_s": round(now_s - self._attempted_s, 1),
            "redis_silent_s": round(now_s - self._acknowledged_s, 1),
            "engine_stalled_s": round(self._watchdog.stalled_s, 1),
            "draining": self.draining,
        }

    async def send(self) -> None:
        """Send one heartbeat, and act on the answer: drop fenced jobs, end canceled and expired ones."""
        self._end_expired()
        pressure = await self._pressure()
        check = self._num_heartbeats % HEARTBEATS_PER_CHECK == 0
        # Read the call number first: a take that is answered in between then belongs to a later call.
        answered_call, held = self._inbox.answered_call, self._ledger.job_ids if check else None
        free = 0 if self.draining else pressure.kv_tokens_available
        answer = await self._broker.heartbeat(pressure, free=free, answered_call=answered_call, held=held)
        self._num_heartbeats += 1
        self._acknowledged_s = time.monotonic()
        for job_id in answer.fenced:
            job = self._ledger.get(job_id)
            if job is not None and job.outcome is None:
                self._outbox.drop(job)
        for job_id in answer.cancelled:
            self._outbox.end_as(job_id, "CANCEL")
        for job_id in answer.expired:
            self._outbox.end_as(job_id, "EXPIRED")

    def _end_expired(self) -> None:
        """End jobs past their deadline, including those without new tokens to publish."""
        now_s = time.monotonic()
        for job in self._ledger:
            if job.outcome is None and now_s >= job.expires_s:
                self._outbox.end_as(job.job_id, "EXPIRED")

    async def _pressure(self) -> NodePressure:
        stats = await self._stats()
        now_s = time.monotonic()
        steps_per_s = self._steps.update(stats.steps, now_s)
        decode_per_s = self._decode.update(stats.decode_tokens, now_s)
        return replace(
            self._base,
            **{name: getattr(stats, name) for name in _SHARED_STATS},
            num_jobs=len(self._ledger),
            kv_tokens_available=self._inbox.kv_tokens_available,
            prefill_tokens_per_s=self._prefill.update(stats.prefill_tokens, now_s),
            decode_tokens_per_s=decode_per_s,
            # Counted only while jobs wait: an idle node's finished jobs do not show how fast it could work.
            drain_cost_per_s=self._drain.update(self._outbox.num_finished_cost, now_s, counts=self._inbox.has_backlog),
            preemptions_per_s=self._preemptions.update(stats.num_preemptions, now_s),
            num_steps=stats.steps,
            mean_batch=decode_per_s / steps_per_s if steps_per_s else 0.0,
            draining=self.draining,
            predicted_outputs=self._ledger.predicted_outputs,
            troubles=self._health.look(self._health_sample(stats, now_s)),
        )

    def _health_sample(self, stats: EngineStats, now_s: float) -> HealthSample:
        return HealthSample(
            now_s=now_s,
            wall_s=time.time(),
            late_s=self._late_s,
            stats=stats,
            engine_stalled_s=self._watchdog.stalled_s,
            redis_silent_s=now_s - self._acknowledged_s,
            # A draining node takes no jobs, so it needs no doorbell.
            hears_doorbell=self.draining or self._inbox.hears_doorbell,
            unsent_bytes=self._ledger.unsent_bytes,
            max_unsent_bytes=self._outbox.max_unsent_bytes,
            num_tokenizer_failures=self._inbox.num_tokenizer_failures,
        )

    async def _stats(self) -> EngineStats:
        """Return the engine's statistics; the last known ones while a long step blocks it, so that heartbeats go on.

        Raises UnavailableError before the first ones, EngineStalledError if the engine hangs.
        """
        answer: EngineStats | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s):
                self.engine_stats = answer = await asyncio.wrap_future(self._worker.stats())
        self._watchdog.look(answer, may_step=not self._worker.is_paused, now_s=time.monotonic())
        if self.engine_stats is None:
            # Logged here, because joining retries silently on UnavailableError, as while Redis is unavailable.
            log.warning("the engine has not answered yet", extra={"waited_s": round(self._watchdog.stalled_s, 1)})
            raise UnavailableError("the engine has not answered yet")
        return self.engine_stats
