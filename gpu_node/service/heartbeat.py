"""The node's heartbeat: each one carries its pressure record; every fifth one compares its jobs with Redis."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

from penstock.contract.errors import DamagedDataError, UnavailableError
from penstock.contract.pool import EngineLoad, NodePressure
from penstock.gpu_node.engine import RankStats
from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.gpus import GpuDriver, GpuLoad
from penstock.gpu_node.jobs.drain import DrainPace, StepParts
from penstock.gpu_node.jobs.held_jobs import HeldJobs
from penstock.gpu_node.publishing.outbox import Outbox
from penstock.gpu_node.service.health import EngineWatch, Health, HealthSample
from penstock.gpu_node.taking.taker import JobTaker
from penstock.queue.broker.node import NodeBroker


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """The state of a node at one moment, which its heartbeats report. Counters grow from its start."""

    stats: EngineStats
    engine_stalled_s: float
    """Seconds without an answer, or without a step although there is work."""
    lost_ranks: str
    """Why the engine waits for its ranks to be started again; empty while all live."""
    answered_call: int
    """Number of the last take call that was answered. `job_ids` lists no jobs of later calls."""
    job_ids: list[str]
    jobs_by_level: tuple[int, ...]
    jobs_by_tenant: dict[str, int]
    kv_tokens_available: int
    sequences_available: int
    queued_kinds: tuple[bool, bool]
    """Whether foreground and background jobs were waiting when the queue was last read."""
    queued_since_s: float
    """Since when that was so whenever the queue was read, by the monotonic clock."""
    hears_doorbell: bool
    num_tokenizer_failures: int
    predicted_outputs: tuple[tuple[int, int, int], ...]
    """Predicted output lengths; see `NodePressure`."""
    times_of_hour: dict[str, tuple[int, ...]]
    unsent_bytes: int
    max_unsent_bytes: int
    failing: str
    """Why Redis refused the last call of a part of this node; empty while it refuses none."""
    gpu: GpuLoad | None


async def take_snapshot(
    watch: EngineWatch, held_jobs: HeldJobs, taker: JobTaker, outbox: Outbox, gpu: GpuDriver
) -> NodeSnapshot:
    """Look at the engine, then return the state of all parts at that moment. Raises as `EngineWatch.look` does."""
    stats = await watch.look()
    load = await asyncio.to_thread(gpu.read, stats.gpu_uuid) if stats.gpu_uuid else None
    held_jobs.look_at_work()
    return NodeSnapshot(
        stats=stats,
        engine_stalled_s=watch.stalled_s,
        lost_ranks=watch.lost_ranks,
        answered_call=taker.answered_call,
        job_ids=held_jobs.job_ids,
        jobs_by_level=held_jobs.jobs_by_level,
        jobs_by_tenant=held_jobs.jobs_by_tenant,
        kv_tokens_available=taker.kv_tokens_available,
        sequences_available=taker.sequences_available,
        queued_kinds=taker.queued_kinds,
        queued_since_s=taker.queued_since_s,
        hears_doorbell=taker.hears_doorbell,
        num_tokenizer_failures=taker.num_tokenizer_failures,
        predicted_outputs=held_jobs.predicted_outputs,
        times_of_hour=held_jobs.counts.jobs.times_of_hour(time.monotonic()),
        unsent_bytes=held_jobs.unsent_bytes,
        max_unsent_bytes=outbox.max_unsent_bytes,
        failing=held_jobs.failing,
        gpu=load,
    )


MAX_INTERVAL_S = 2.0
MIN_PAUSE_S = 0.02
CUT_OFF_INTERVAL_S = 0.5
"""Interval while Redis does not answer, or the last record said that something to do with Redis is unhealthy. So a node
is shown as healthy soon after Redis is back."""
_PARTS_OF_REDIS = frozenset(("redis", "doorbell", "outbox"))
HEARTBEATS_PER_LEASE = 6
HEARTBEATS_PER_CHECK = 5
"""Every fifth heartbeat compares the ids of all held jobs with Redis."""
FEW_STEPS = 128
"""Steps after which the engine's model of step times is used, instead of what was measured at the start. Where a job
ended that measurement, it is used at once."""
TYPICAL_COST = 512
"""KV tokens of a sequence that are assumed for the number of sequences, while no jobs wait."""
_RATE_HALF_LIFE_S = 10.0
_SHARED_STATS = [field.name for field in fields(EngineLoad)]
"""Statistics that a pressure record copies from the engine."""


def heartbeat_interval_s(lease_ms: int) -> float:
    """Return the seconds between two heartbeats of a node whose leases last `lease_ms`."""
    return min(MAX_INTERVAL_S, lease_ms / 1000 / HEARTBEATS_PER_LEASE)


class RateEstimator:
    """A rate per second from a counter: an exponentially fading average.

    With `keeps`, intervals without gain do not count: the rate then means the speed while there is work.
    """

    def __init__(self, now_s: float, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._last_s = now_s
        self._last = 0.0
        self.per_s = 0.0

    def update(self, total: float, now_s: float) -> float:
        """Add a counter's new value and return the rate."""
        elapsed_s, gained = now_s - self._last_s, total - self._last
        self._last_s, self._last = now_s, total
        if elapsed_s > 0 and (gained > 0 or not self._keeps):
            fade = 0.5 ** (elapsed_s / _RATE_HALF_LIFE_S) if self.per_s else 0.0
            self.per_s = fade * self.per_s + (1 - fade) * gained / elapsed_s
        return self.per_s


class RecentGains:
    """What counters, which grow from the engine's start, gained in the last `WINDOW_S` seconds."""

    WINDOW_S = 60.0

    def __init__(self, now_s: float) -> None:
        self._samples = deque[tuple[float, tuple[float, ...]]]([(now_s, ())])
        self._left_out: tuple[float, ...] = ()

    def leave_out(self, before: tuple[float, ...], after: tuple[float, ...]) -> None:
        """Do not count what was gained between these two moments, the last ones. Updates may lie in between."""
        gained = (new - old for new, old in zip(after, before, strict=True))
        self._left_out = tuple(old + new for old, new in zip_longest(self._left_out, gained, fillvalue=0.0))
        known = self._counted(after)
        self._samples = deque((at_s, tuple(map(min, values, known))) for at_s, values in self._samples)

    def _counted(self, counters: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(all_of_it - one for all_of_it, one in zip_longest(counters, self._left_out, fillvalue=0.0))

    def update(self, counters: tuple[float, ...], now_s: float) -> tuple[float, ...]:
        """Add the counters' new values. Return what they gained."""
        counters = self._counted(counters)
        self._samples.append((now_s, counters))
        while now_s - self._samples[1][0] >= self.WINDOW_S:
            self._samples.popleft()
        before = self._samples[0][1]
        return tuple(new - old for new, old in zip_longest(counters, before, fillvalue=0.0))


def _lookups(stats: EngineStats) -> tuple[float, float]:
    return stats.prefix_hit_tokens, stats.prefix_lookup_tokens


class RecentRanks:
    """What the ranks spent in the last `RecentGains.WINDOW_S` seconds, or since they were started again."""

    def __init__(self) -> None:
        self._samples = deque[tuple[float, RankStats]]()

    def update(self, ranks: RankStats, now_s: float) -> dict[str, Any]:
        """Add new values. Return what a pressure record says of ranks; nothing of a single one."""
        if ranks.num_ranks == 1:
            return {}
        if self._samples and ranks.since(self._samples[-1][1]) is None:
            self._samples.clear()
        self._samples.append((now_s, ranks))
        while len(self._samples) > 1 and now_s - self._samples[1][0] >= RecentGains.WINDOW_S:
            self._samples.popleft()
        held = {"rank_weight_bytes": ranks.weight_bytes, "rank_kv_bytes": ranks.kv_bytes}
        spent = ranks.since(self._samples[0][1])
        if spent is None or not spent.num_steps or not spent.waited_s:
            return held
        times = {"rank_exchange_ms": spent.exchanged_s, "rank_wait_ms": spent.waited_s}
        each = {name: 1e3 * sum(spent_s) / (len(spent_s) * spent.num_steps) for name, spent_s in times.items()}
        return {**held, **each, "stage_idle": tuple(round(share, 4) for share in spent.stage_idle)}


class Heartbeat:
    """The sender of a node's heartbeats. It also sweeps the pool, so that every living node notices dead nodes."""

    def __init__(
        self,
        broker: NodeBroker,
        outbox: Outbox,
        snapshot: Callable[[], Awaitable[NodeSnapshot]],
        *,
        base: NodePressure,
        held_jobs: HeldJobs,
        interval_s: float,
        pause: Callable[[float], Awaitable[None]],
        is_compared: Callable[[], bool],
    ) -> None:
        """`base`: the part of the pressure that stays the same. `outbox` ends the jobs that Redis names.

        `pause` waits for an interval, or until something happens that a heartbeat should tell at once.
        `held_jobs` know what they have computed when a snapshot has been taken. `is_compared`: whether the history of
        Redis is the known one. In a new one, jobs that ended here may seem to run here, until their ends are repeated.
        """
        self._broker = broker
        self._outbox = outbox
        self._snapshot = snapshot
        self._base = base
        self._interval_s = interval_s
        self._pause = pause
        self._held_jobs = held_jobs
        self._drain = held_jobs.drain
        self._prefill, self._decode, self._steps = (RateEstimator(time.monotonic()) for _ in range(3))
        self._preemptions = RateEstimator(time.monotonic(), keeps=False)
        self._engine_time, self._hits = (RecentGains(time.monotonic()) for _ in range(2))
        self._ranks = RecentRanks()
        self._is_compared = is_compared
        self._num_heartbeats = 0
        self._acknowledged_s, self._late_s = time.monotonic(), 0.0
        self._attempted_s = time.monotonic()
        self._is_cut_off = False
        self._health = Health()
        self.measured_costs: StepParts | None = None
        """What steps take, as measured before the first job."""
        self.draining = False
        self._before_measuring: EngineStats | None = None

    def note_measuring(self, before: EngineStats | None) -> None:
        """Note that what is looked up in the prefix cache from a moment on is not by jobs; None: from now on it is."""
        self._before_measuring = before

    def leave_out_lookups(self, before: EngineStats, after: EngineStats) -> None:
        """Leave what was looked up in the prefix cache between these moments out of its hit rate: not by jobs."""
        self._hits.leave_out(_lookups(before), _lookups(after))

    async def run(self) -> None:
        """Send heartbeats until canceled. Raises LeaseLostError if the pool declared this node dead.

        The next one is sent sooner if the lease of a silent node ends before it, whose jobs can then run elsewhere.
        """
        while True:
            pause_s = self._interval_s
            try:
                self._is_cut_off = True
                await self.send()
                left_s = await self._broker.sweep()
                if left_s is not None:
                    pause_s = min(pause_s, max(MIN_PAUSE_S, left_s))
                self._held_jobs.round_done("heartbeat")
            except UnavailableError as error:
                self._held_jobs.redis_failed("heartbeat", error)
            except DamagedDataError as error:
                self._held_jobs.round_failed("heartbeat", error)
            self._attempted_s = time.monotonic()
            if self._is_cut_off:
                pause_s = min(pause_s, CUT_OFF_INTERVAL_S)
            wake_s = self._attempted_s + pause_s
            await self._pause(pause_s)
            self._late_s = max(0.0, time.monotonic() - wake_s)

    def state(self) -> dict[str, float | bool]:
        """Return the state for health checks: times in seconds, since the last attempt and the last success to send."""
        now_s = time.monotonic()
        return {
            "heartbeat_age_s": round(now_s - self._attempted_s, 1),
            "redis_silent_s": round(now_s - self._acknowledged_s, 1),
            "draining": self.draining,
        }

    async def send(self) -> None:
        """Send one heartbeat, and act on the answer: drop fenced jobs, end canceled and expired ones."""
        self._outbox.end_expired(time.monotonic())
        snapshot = await self._snapshot()
        pressure = self._pressure(snapshot, time.monotonic())
        checks = self._num_heartbeats % HEARTBEATS_PER_CHECK == 0 and self._is_compared()
        held = snapshot.job_ids if checks else None
        free = -1 if self.draining else pressure.kv_tokens_available
        answer = await self._broker.heartbeat(pressure, free=free, answered_call=snapshot.answered_call, held=held)
        self._num_heartbeats += 1
        self._acknowledged_s = time.monotonic()
        self._is_cut_off = not _PARTS_OF_REDIS.isdisjoint(pressure.troubles)
        self._outbox.handle_heartbeat_answer(answer)

    def _pressure(self, snapshot: NodeSnapshot, now_s: float) -> NodePressure:
        stats = snapshot.stats
        steps_per_s = self._steps.update(stats.steps, now_s)
        decode_per_s = self._decode.update(stats.decode_tokens, now_s)
        hits, lookups = self._hits.update(_lookups(self._before_measuring or stats), now_s)
        foreground, background = self._paces(snapshot, now_s, hits / lookups if lookups else 0.0)
        gpu = snapshot.gpu
        return replace(
            self._base,
            **{name: getattr(stats, name) for name in _SHARED_STATS},
            **self._ranks.update(stats.ranks, now_s),
            num_jobs=len(snapshot.job_ids),
            jobs_by_level=snapshot.jobs_by_level,
            jobs_by_tenant=snapshot.jobs_by_tenant,
            kv_tokens_available=snapshot.kv_tokens_available,
            sequences_available=snapshot.sequences_available,
            prefill_tokens_per_s=self._prefill.update(stats.prefill_tokens, now_s),
            decode_tokens_per_s=decode_per_s,
            drain_cost_per_s=foreground.cost_per_s,
            background_cost_per_s=background.cost_per_s,
            pace_spreads=(foreground.spread, background.spread),
            preemptions_per_s=self._preemptions.update(stats.num_preemptions, now_s),
            prefix_hit_rate=hits / lookups if lookups else None,
            gpu_utilization=None if gpu is None else gpu.utilization,
            gpu_memory_used_bytes=0 if gpu is None else gpu.memory_used_bytes,
            gpu_memory_total_bytes=0 if gpu is None else gpu.memory_total_bytes,
            recent_engine_ms=tuple(1e3 * gained_s for gained_s in self._engine_time.update(stats.level_seconds, now_s)),
            num_steps=stats.steps,
            mean_batch=decode_per_s / steps_per_s if steps_per_s else 0.0,
            draining=self.draining,
            predicted_outputs=snapshot.predicted_outputs,
            times_of_hour=snapshot.times_of_hour,
            troubles=self._health.look(self._health_sample(snapshot, now_s)),
            past_troubles=self._health.past,
        )

    def _paces(self, snapshot: NodeSnapshot, now_s: float, hit_rate: float) -> tuple[DrainPace, DrainPace]:
        """Return the paces of foreground and background work. `hit_rate`: of the prefix cache, in the last minute."""
        stats, most = snapshot.stats, self._base.max_num_seqs
        foreground_waits, background_waits = snapshot.queued_kinds
        self._drain.update(
            now_s,
            num_running=stats.num_running,
            foreground_waits=foreground_waits,
            background_waits=background_waits,
            since_s=snapshot.queued_since_s,
            kind_seconds=(stats.kind_seconds.get("foreground", 0.0), stats.kind_seconds.get("background", 0.0)),
        )
        # Jobs that wait for a moment, such as those that are left to other nodes, do not show that this node is full.
        is_full = (foreground_waits or background_waits) and now_s - snapshot.queued_since_s > self._interval_s
        if is_full:
            num_sequences = stats.num_running
        else:
            num_sequences = min(most, stats.kv_blocks_total * stats.block_size // TYPICAL_COST)
        costs = self.measured_costs
        if stats.step_costs_ms is not None and (costs is None or stats.steps >= FEW_STEPS):
            costs = StepParts(*stats.step_costs_ms)
        return self._drain.paces(costs and costs.with_cache(hit_rate), max(1, num_sequences))

    def _health_sample(self, snapshot: NodeSnapshot, now_s: float) -> HealthSample:
        return HealthSample(
            now_s=now_s,
            wall_s=time.time(),
            late_s=self._late_s,
            stats=snapshot.stats,
            engine_stalled_s=snapshot.engine_stalled_s,
            lost_ranks=snapshot.lost_ranks,
            redis_silent_s=now_s - self._acknowledged_s,
            # A draining node takes no jobs, so it needs no doorbell.
            hears_doorbell=self.draining or snapshot.hears_doorbell,
            unsent_bytes=snapshot.unsent_bytes,
            max_unsent_bytes=snapshot.max_unsent_bytes,
            failing=snapshot.failing,
            num_tokenizer_failures=snapshot.num_tokenizer_failures,
        )
