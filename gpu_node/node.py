"""A node: joins a pool, takes jobs for its engine, publishes their tokens, and drains before it leaves."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.contract.errors import PenstockError, UnavailableError
from penstock.contract.job import SamplingParams
from penstock.contract.pool import NodePressure, PoolRecord
from penstock.contract.tasks import DECODER_KINDS, MAX_TEXTS_OF_JOB, SCORE
from penstock.contract.tool_formats import BY_NAME, ToolFormat
from penstock.gpu_node.engine.records import EngineRequest, EngineStats, StepOutput
from penstock.gpu_node.engine.shared_cores import Gate
from penstock.gpu_node.engine.worker import EngineLike, EngineWorker
from penstock.gpu_node.gpus import GpuDriver
from penstock.gpu_node.jobs.drain import (
    FEW_OUTPUTS,
    MAX_FEW_OUTPUTS,
    PHASE_PROMPT_TOKENS,
    SHORT_PROMPT_TOKENS,
    StepParts,
    phases,
)
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.jobs.held_jobs import HeldJobs, JobReports
from penstock.gpu_node.monitor.profile import NodeProfiler
from penstock.gpu_node.publishing.attempts import Attempts
from penstock.gpu_node.publishing.ended_jobs import EndedJobs
from penstock.gpu_node.publishing.outbox import Outbox
from penstock.gpu_node.publishing.sending import new_pace
from penstock.gpu_node.service.health import EngineStalledError, EngineWatch
from penstock.gpu_node.service.heartbeat import Heartbeat, heartbeat_interval_s, take_snapshot
from penstock.gpu_node.service.liveness import answering
from penstock.gpu_node.service.seats import NO_SEATS, Seats, declare_dead
from penstock.gpu_node.settings import NodeSettings
from penstock.gpu_node.taking.hand_over import HandOver
from penstock.gpu_node.taking.load_shedder import LoadShedder
from penstock.gpu_node.taking.preparation import JobPreparation
from penstock.gpu_node.taking.taker import Bell, JobTaker, listen
from penstock.queue import keys
from penstock.queue.broker.connection import connect, warn_of_eviction, with_retries
from penstock.queue.broker.history import HistoryWatch
from penstock.queue.broker.jobs import past_leases_of
from penstock.queue.broker.node import LeaseLostError, NodeBroker
from penstock.queue.broker.profiles import DOORBELL, ProfileBroker
from penstock.queue.broker.shared_connection import clock_of
from penstock.queue.policy import LEAST_URGENT
from penstock.runtime import crash_points
from penstock.runtime.event_loop import Threads, cancel_until_done
from penstock.runtime.tracing.setup import tracing_of

log = logging.getLogger(__package__)


JOIN_PATIENCE_S = 60.0
"""How long joining the pool is retried while Redis is unavailable."""
LEAVE_PATIENCE_S = 5.0
"""How long each step of the drain is retried while Redis is unavailable, and how long the engine may take to end."""
MEASURE_POLL_S = 0.02
MAX_MEASURED_ROUNDS = 4
"""Times that each phase of the measurement runs."""
MEASURED_REQUEST = "measure"
MEASURE_S = 2.0
"""Seconds after which no further round begins."""
_RUNNER_PARTS = ("forward", "sample")
ANNOUNCE_S = 2.0
"""Interval at which the adapter folder is scanned for changes."""


class Node:
    """The service around one engine: asyncio code for Redis, and the engine on its own thread. It serves one pool."""

    def __init__(
        self, settings: NodeSettings, engine: EngineLike, seats: Seats = NO_SEATS, gate: Gate | None = None
    ) -> None:
        self._settings = settings
        self._seats = seats
        self._engine = engine
        self.node_id = f"{settings.name}-{secrets.token_hex(8)}"
        self._redis = connect(settings.redis_url)
        self._tracing = tracing_of(settings.otlp_traces_endpoint, "penstock-node")
        reports = self._new_reports()
        self.held_jobs = HeldJobs(engine.max_model_len)
        self.held_jobs.counts.jobs.max_waits_s = settings.max_waits_s
        self._broker = NodeBroker(self._redis, settings.pool_name, self.node_id, engine.revision)
        self._stop, self._end_grace = asyncio.Event(), asyncio.Event()
        self._bell = Bell()
        self._worker = EngineWorker(engine, self._deliver, self._note_lost, gate)
        keep_s, max_bytes = settings.failover_keep_s, settings.failover_keep_bytes
        self.pace = new_pace(settings.stream_interval_ms / 1000, leaves_core_free=engine.leaves_core_free)
        self._outbox = Outbox(
            self._broker,
            self.held_jobs,
            self._worker,
            reports,
            self._bell.capacity_freed,
            (
                EndedJobs(self._broker, self.held_jobs.counts, keep_s=keep_s, max_bytes=max_bytes),
                Attempts(self._broker, max_attempts=settings.max_attempts),
            ),
            max_unsent_bytes=settings.max_unsent_bytes,
            pace=self.pace,
        )
        sizes = {"kv_tokens": engine.num_kv_tokens, "max_num_seqs": settings.max_num_seqs}
        self._load_shedder = LoadShedder(self._broker, self.held_jobs, self._worker, reports, self._outbox, **sizes)
        self._hand_over = HandOver(self._broker, self.held_jobs, self._load_shedder)
        self._threads = Threads()
        self._preparation = JobPreparation(
            self._broker,
            self.held_jobs,
            self._worker,
            (engine.tokenizer, engine.texts, engine.pairs),
            reports,
            self._outbox,
            self._load_shedder,
            self._threads,
        )
        capacity = engine.num_kv_tokens, settings.max_num_seqs
        self._history = HistoryWatch(self._redis, self._outbox.compare, name=self.node_id)
        parts = self._broker, self.held_jobs, self._bell, self._outbox, self._preparation, engine
        self._taker = JobTaker(*parts, capacity=capacity, may_take=lambda: self._history.is_settled)
        interval_s = heartbeat_interval_s(settings.lease_ms)
        self._watch = EngineWatch(self._worker, interval_s=interval_s, stall_after_s=settings.stall_after_s)
        self._heartbeat = self._new_heartbeat(interval_s)
        profiles = ProfileBroker(self._redis)
        self._profiler = NodeProfiler(profiles, self._worker, engine, settings.pool_name, self.node_id)

    @property
    def engine_stats(self) -> EngineStats | None:
        """The engine's statistics as of the last heartbeat; None before the first one."""
        return self._watch.stats

    @property
    def engine_advances(self) -> bool:
        """Whether the engine answered at the last heartbeat and, with work, had made a step since the one before."""
        return not self._watch.stalled_s

    def stop(self) -> None:
        """Stop taking jobs; running jobs may finish within `drain_s`. A second call ends that grace period."""
        if self._stop.is_set():
            self._end_grace.set()
        self._stop.set()

    async def measure_steps(self) -> None:
        """Learn what steps of the idle engine take, so that the pool can estimate waits before any job has run.

        A job that comes meanwhile ends the measurement.
        """
        most, ends_s = self._settings.max_num_seqs, time.monotonic() + MEASURE_S
        num_prompt, num_outputs = PHASE_PROMPT_TOKENS, FEW_OUTPUTS
        longest = min(self._engine.max_model_len, self._engine.num_kv_tokens // 2) - MAX_FEW_OUTPUTS
        # The first step is slower than all others.
        if await self._time_of(1, 1, num_prompt, 0) is None:
            return
        fastest_ms = [math.inf] * len(phases(most))
        for number in range(MAX_MEASURED_ROUNDS):
            for at, phase in enumerate(phases(most, num_outputs)):
                if (took_ms := await self._time_of(*phase, num_prompt, number)) is None:
                    return
                # What else runs on the machine only makes steps slower.
                fastest_ms[at] = min(fastest_ms[at], took_ms)
            costs = StepParts.measured(fastest_ms, most, num_prompt, num_outputs)
            self._heartbeat.measured_costs = costs
            if time.monotonic() > ends_s:
                return
            if number == 0:
                num_prompt, num_outputs = costs.longer_prompt(longest), costs.more_outputs(most)
                fastest_ms[1:] = [math.inf] * (len(fastest_ms) - 1)

    async def _time_of(self, num_sequences: int, num_outputs: int, num_prompt: int, round_number: int) -> float | None:
        """Return the milliseconds of the engine's steps with these sequences; None if it has other work.

        The sequences share a prompt, which is short for one alone. The number of the round makes prompts differ, so
        that none is cached.
        """
        params = SamplingParams(n=num_sequences, temperature=1, max_tokens=num_outputs, ignore_eos=True)
        length = num_prompt if num_sequences > 1 else SHORT_PROMPT_TOKENS
        number = num_outputs + 64 * round_number
        prompt = [1 + (number >> 2 * (at % 8)) % 4 for at in range(length)]
        request = EngineRequest(MEASURED_REQUEST, prompt, params, seed=0, level=LEAST_URGENT, background=True)
        refused = list[Exception]()
        before = await asyncio.wrap_future(self._worker.stats())
        try:
            self._heartbeat.note_measuring(before)
            self._worker.add(request, refused.append)
            while not len(self.held_jobs):
                after = await asyncio.wrap_future(self._worker.stats())
                if refused:
                    raise refused[0]
                if not after.num_running + after.num_waiting:
                    self._heartbeat.leave_out_lookups(before, after)
                    return sum(1e3 * (after.part_seconds[part] - before.part_seconds[part]) for part in _RUNNER_PARTS)
                await asyncio.sleep(MEASURE_POLL_S)
        except PenstockError:
            log.info("the steps of this engine cannot be measured")
        finally:
            self._worker.abort(MEASURED_REQUEST)
            self._heartbeat.note_measuring(None)
        return None

    async def shed_load(self) -> None:
        """Give back jobs that do not fit here and fit on another node. The load shedder also does this every second."""
        await self._load_shedder.shed_load()

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Serve until `stop`, then drain. Raises the error that ended the engine; other nodes take over its jobs."""
        self._worker.start()
        try:
            if not await self._join_unless_stopped():
                return
            await warn_of_eviction(self._redis)
            if ready is not None:
                ready.set()
            log.info("node serves", extra={"node_id": self.node_id, "pool": self._settings.pool_name})
            async with (
                answering(self._settings.name, self.state),
                _background(self._heartbeat_forever(), self._outbox.run(), self._history.run()),
            ):
                doorbell = keys.doorbell(self._settings.pool_name, self.node_id)
                serving = [self._take_forever(), self._load_shedder.run(), self._profiler.run()]
                serving.append(self._load_shedder.give_back_lost())
                serving.append(listen(self._redis, doorbell, self._bell, self._on_message))
                serving.append(declare_dead(self._broker, self._seats, has_joined=True))
                if self._settings.has_adapters:
                    serving.append(self._announce_forever())
                async with _background(*serving):
                    await self._until_stopped()
                await self._drain()
            await self._leave()
        finally:
            self._outbox.close()
            self._worker.stop()
            await self._redis.aclose()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    def state(self) -> dict[str, object]:
        """Return what a health check gets. Any thread may call this."""
        stalled_s = round(self._watch.stalled_s, 1)
        node = {"node_id": self.node_id, "pool": self._settings.pool_name, "engine_stalled_s": stalled_s}
        clock = {"clock_offset_s": round(clock_of(self._redis).offset_s, 3)}
        return node | self._heartbeat.state() | clock

    async def _join_unless_stopped(self) -> bool:
        """Join the pool, and return whether that was done before `stop`. Redis may be away for a while."""
        tasks = joining, _ = [
            asyncio.create_task(with_retries(self._join, JOIN_PATIENCE_S)),
            asyncio.create_task(self._stop.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                await joining
                return True
            log.info("the node was stopped before it joined", extra={"node_id": self.node_id})
            return False
        finally:
            await cancel_until_done(tasks)

    async def _join(self) -> None:
        settings, engine = self._settings, self._engine
        # The chat template renders a chat or more for these, and may be slow.
        detected = await self._threads.run(lambda: engine.tokenizer.reasoning_parser)
        switches = await self._threads.run(lambda: engine.tokenizer.thinking_switches)
        await self._threads.run(lambda: engine.tokenizer.reasoning_rule(None))  # It renders a chat at its first use.
        tool_format, reason = await self._threads.run(self._tool_format)
        capabilities = await self._threads.run(engine.capabilities)
        is_detected = settings.reasoning_parser in (None, detected)
        self._record = PoolRecord(
            pool=settings.pool_name,
            model=settings.model_name,
            aliases=settings.aliases,
            max_model_len=engine.max_model_len,
            max_token_bytes=engine.tokenizer.max_token_bytes,
            tool_format=tool_format,
            tool_format_reason=reason,
            reasoning_parser=settings.reasoning_parser or detected,
            # The switches tell how the reasoning parser differs with template variables.
            thinking_switches=switches if is_detected else (),
            created_s=int(time.time()),
            revision=engine.revision,
            adapters=await self._threads.run(engine.adapters),
            kinds=_kinds_of(engine),
            texts_per_job=1 if (texts := engine.texts) is None else MAX_TEXTS_OF_JOB,
            dimensions=0 if texts is None else texts.dimensions,
            similarity="cosine" if texts is None else texts.similarity,
            sampling_defaults=engine.sampling_defaults
            | ({} if settings.reasoning_budget is None else {"reasoning_budget": settings.reasoning_budget}),
            takes_effort=engine.tokenizer.takes_effort,
            moved_messages=await self._threads.run(lambda: getattr(engine.tokenizer, "moved_shapes", ())),
            capabilities=tuple(one for one in capabilities if one != "tools" or tool_format.takes_tools),
        )
        # Nodes of a pool must agree on their limits: otherwise one node would fail a job that another has accepted.
        config = settings.pool_config | {"max_model_len": engine.max_model_len}
        await self._broker.join(config, self._record)
        if self._seats.names:
            await self._broker.declare_dead(self._seats.names, has_joined=True)
        await self._heartbeat.send()
        await self._broker.sweep()

    def _tool_format(self) -> tuple[ToolFormat, str]:
        """Return how the model writes calls, and why. It renders some chats, and logs what was found."""
        given, tokenizer = self._settings.tool_parser, self._engine.tokenizer
        form = tokenizer.tool_format
        if given is not None:
            form = replace(BY_NAME[given], reasoning=form.reasoning)
        use = getattr(tokenizer, "tool_use", None)
        reason = "" if use is None else use.reason
        if use is not None:
            log.info("the format of tool calls was chosen", extra={"tool_format": form.name, "reason": reason})
        return form, reason

    async def _rejoin(self) -> None:
        """Drop all jobs and join again: the pool declared this node dead and gave its jobs to other nodes."""
        log.error("this node was declared dead; it drops all its jobs", extra={"node_id": self.node_id})
        for job in self.held_jobs:
            self._outbox.drop(job)
        await with_retries(self._join, math.inf)

    async def _heartbeat_forever(self) -> None:
        while True:
            try:
                with suppress(LeaseLostError):
                    await self._heartbeat.run()
            except EngineStalledError:
                await self._give_back_unaffected()
                raise
            with suppress(LeaseLostError):
                await self._rejoin()

    async def _give_back_unaffected(self) -> None:
        """Give back the jobs outside the stalled step, so that this node's end does not count as their loss."""
        if not (in_flight := self._worker.requests_in_flight()):
            return  # The engine hangs outside a step, so any job may be the cause.
        hung = [job.job_id for job in self.held_jobs if job.taken.lease in in_flight]
        log.error("a step hangs", extra={"jobs": hung})
        with suppress(UnavailableError, LeaseLostError):
            await self._give_back([job for job in self.held_jobs if job.taken.lease not in in_flight])

    async def _take_forever(self) -> None:
        while True:
            try:
                await self._taker.run()
            except LeaseLostError:
                # The heartbeat gets the same error and rejoins.
                await asyncio.sleep(0.1)

    async def _announce_forever(self) -> None:
        """Announce the pool again and again: its adapters may have changed, and its record may have been damaged."""
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            adapters = await self._threads.run(self._engine.adapters)
            self._record = replace(self._record, adapters=adapters)
            await with_retries(lambda: self._broker.announce(self._record), math.inf)

    def _on_message(self, text: str) -> None:
        """Handle a message of the doorbell: a request for a profile, or the id of a canceled job."""
        if text == DOORBELL:
            self._profiler.ring()
        else:
            self._outbox.end_as(text, "CANCEL")

    async def _until_stopped(self) -> None:
        died = asyncio.wrap_future(self._worker.stopped)

        async def end() -> None:
            await asyncio.wait((died,))

        await _first_of(self._stop.wait(), end())
        if died.done():
            # The engine's memory trace names jobs by their leases, so the log line maps leases to job ids.
            held = {job.taken.lease: job.job_id for job in self.held_jobs}
            log.error("the engine died while it held jobs", extra={"jobs": held})
            died.result()

    async def _drain(self) -> None:
        """Let jobs finish for `drain_s`, or move to other nodes, and then give the rest back.

        Their tokens are in the job logs by then.
        """
        ends_s = time.monotonic() + self._settings.drain_s
        self._heartbeat.draining = True
        with suppress(UnavailableError, LeaseLostError):
            # Announce the drain first: if the node dies from here on, its jobs do not count it as a loss.
            await self._heartbeat.send()
        log.info("draining", extra={"num_jobs": len(self.held_jobs)})
        with suppress(UnavailableError, LeaseLostError):
            await with_retries(self._taker.close, LEAVE_PATIENCE_S)
            await self._give_back([job for job in self.held_jobs if not job.is_in_engine])
        is_over = asyncio.Event()
        moving = asyncio.create_task(self._hand_over.run(ends_s, is_over))
        try:
            await _first_of(self._outbox.until_empty(), self._end_grace.wait(), timeout_s=ends_s - time.monotonic())
            is_over.set()
            # A call to Redis that is under way ends first, so that this node knows which jobs have left.
            await asyncio.wait((moving,), timeout=LEAVE_PATIENCE_S)
        finally:
            await cancel_until_done((moving,))
        self._worker.stop()
        await asyncio.wait((asyncio.wrap_future(self._worker.stopped),), timeout=LEAVE_PATIENCE_S)
        with suppress(UnavailableError):
            await with_retries(self._outbox.flush, LEAVE_PATIENCE_S)
            await self._give_back(list(self.held_jobs))

    async def _leave(self) -> None:
        try:
            num_kept = await with_retries(self._broker.leave, LEAVE_PATIENCE_S)
        except UnavailableError as error:
            why = {"node_id": self.node_id, "reason": error.reason}
            log.warning("the node could not tell the pool that it stops", extra=why)
        else:
            facts = {"num_given_back": self.held_jobs.counts.given_back_drain, "num_kept": num_kept}
            log.info("left", extra={"node_id": self.node_id, **facts})

    async def _give_back(self, jobs: list[HeldJob]) -> None:
        await with_retries(lambda: self._load_shedder.give_back(jobs), LEAVE_PATIENCE_S)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """Pass a step's outputs to the outbox. Runs on the engine's thread."""
        crash_points.point("after", "step")
        with suppress(RuntimeError):  # The event loop may be closed already.
            self._outbox.deliver(outputs)

    def _note_lost(self, requests: frozenset[str]) -> None:
        """Pass on the requests of a lost step. Runs on the engine's thread."""
        with suppress(RuntimeError):  # The event loop may be closed already.
            self._load_shedder.note_lost(requests)

    def _new_reports(self) -> JobReports:
        model, logs_jobs = self._settings.model_name, self._settings.log_jobs
        if self._tracing is None:
            return JobReports(model, logs_jobs=logs_jobs)
        # Imported here, because a node without traces does not need OpenTelemetry.
        from penstock.gpu_node.monitor.job_spans import JobSpans

        past_leases = partial(past_leases_of, self._redis)
        spans = JobSpans(
            self._tracing, past_leases, node_id=self.node_id, model=model, ranks=lambda: self._engine.ranks
        )
        return JobReports(model, logs_jobs=logs_jobs, spans=spans)

    def _new_heartbeat(self, interval_s: float) -> Heartbeat:
        base = NodePressure(
            node_id=self.node_id,
            max_num_seqs=self._settings.max_num_seqs,
            max_model_len=self._engine.max_model_len,
            revision=self._engine.revision,
        )
        snapshot = partial(take_snapshot, self._watch, self.held_jobs, self._taker, self._outbox, GpuDriver())
        return Heartbeat(
            self._broker,
            self._outbox,
            snapshot,
            base=base,
            held_jobs=self.held_jobs,
            interval_s=interval_s,
            pause=self._watch.pause,
            is_compared=lambda: self._history.is_compared,
        )


async def _first_of(*waits: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> None:
    """Wait until the first of these is done, then cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def _background(*services: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run services beside the body. A service that fails cancels the body; the end of the body cancels the services."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(service) for service in services]
        try:
            yield
        finally:
            await cancel_until_done(tasks)


def _kinds_of(engine: EngineLike) -> tuple[str, ...]:
    """Return the kinds of jobs that an engine can run."""
    if engine.texts is not None:
        return engine.texts.kinds
    return DECODER_KINDS if engine.pairs is None else (*DECODER_KINDS, SCORE)
