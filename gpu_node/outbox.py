"""From the engine to Redis: one emit call for the whole batch, and one finish call for each job that ended.

While Redis is unavailable or slow, outputs accumulate in the ledger; then each choice's output leaves as one chunk.
Tokens that come faster than readers need them wait too (`publish_pace.py`). Until they leave, the engine's steps do not
wake the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from penstock.contract.errors import InvariantError, UnavailableError
from penstock.contract.output import Outcome
from penstock.gpu_node.alarm import Alarm
from penstock.gpu_node.doorbell import Bell
from penstock.gpu_node.engine.records import StepOutput
from penstock.gpu_node.engine_worker import EngineWorker
from penstock.gpu_node.held_job import HeldJob
from penstock.gpu_node.ledger import Ledger
from penstock.gpu_node.outcomes import BY_ANSWER, outcome_of
from penstock.gpu_node.publish_pace import Pace
from penstock.queue.broker.node import MAX_EMIT_BYTES, Emission, HeartbeatAnswer, NodeBroker, emit_batches
from penstock.queue.broker.retry import pauses
from penstock.queue.msgpack_codec import new_pack
from penstock.runtime.cooperative import LoopYielder
from penstock.runtime.gather import gather_all

log = logging.getLogger(__name__)

MAX_CALLS_AT_ONCE = 16
"""Emit and finish calls that may be in flight together."""


class Outbox:
    """The publisher of a node's tokens and job ends. It rings the inbox's bell when a job has freed capacity."""

    def __init__(
        self, broker: NodeBroker, ledger: Ledger, worker: EngineWorker, bell: Bell, *, max_unsent_bytes: int, pace: Pace
    ) -> None:
        self._broker = broker
        self._ledger = ledger
        self._worker = worker
        self.max_unsent_bytes = max_unsent_bytes
        self._pace = pace
        self._bell = bell
        self._pack = new_pack()
        self._yielder = LoopYielder()
        self._loop = asyncio.get_running_loop()
        self._delivered: deque[tuple[float, Sequence[StepOutput]]] = deque()
        """Outputs that the event loop has not handled, each with the time of its step."""
        self._sleeping = False
        """Whether delivered outputs may wait for the alarm, unless a reader waits for one of them."""
        self._alarm = Alarm()
        self._dirty: dict[str, HeldJob] = {}
        self._reader_waits = False
        """Whether a reader waits for an unsent first token or an unsent end."""
        self._emptied = asyncio.Event()

    def deliver(self, outputs: Sequence[StepOutput]) -> None:
        """Accept one step's outputs. Runs on the engine's thread. Raises RuntimeError if the loop is closed."""
        self._delivered.append((time.monotonic(), outputs))
        if not self._sleeping or any(output.is_first_or_last for output in outputs):
            self._loop.call_soon_threadsafe(self._handle_steps)

    def _handle_steps(self) -> None:
        self._collect()
        if self._dirty:
            self._set_alarm()

    def _collect(self) -> None:
        while self._delivered:
            self._accept_step(*self._delivered.popleft())

    def _accept_step(self, at_s: float, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            job = self._ledger.of_lease(output.request_id)
            if job is None or job.outcome is not None:
                continue
            try:
                self._accept(job, output, at_s)
            except InvariantError as error:
                log.exception("engine and ledger disagree", extra={"job_id": job.job_id})
                self.end(job, Outcome("failed", error.code, error.message))
            self._mark_dirty(job)

    def _mark_dirty(self, job: HeldJob) -> None:
        self._dirty[job.taken.lease] = job
        self._reader_waits = self._reader_waits or job.is_awaited

    def _schedule(self, job: HeldJob) -> None:
        self._mark_dirty(job)
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Set the alarm for the time at which the next unsent outputs should leave."""
        self._alarm.set(self._pace.until_next_s(len(self._dirty), self._loop.time(), reader_waits=self._reader_waits))
        self._sleeping = True

    def _accept(self, job: HeldJob, output: StepOutput, at_s: float) -> None:
        if output.prefill is not None:
            job.prefill = output.prefill
            return
        job.add_tokens(output)
        if output.token_ids:
            self._ledger.counts.jobs.generated(job.taken.priority, job.times, output.choice, at_s)
        if output.finish_reason is None:
            return
        job.close_choice(output)
        if job.is_complete:
            job.outcome = outcome_of(job)
            self._ledger.learn(job)
            self._bell.capacity_freed()

    def end(self, job: HeldJob, outcome: Outcome) -> None:
        """End a job early, with the output so far; no effect if it is no longer held."""
        if self._ledger.of_lease(job.taken.lease) is None:
            return
        if job.outcome is None:
            job.outcome = outcome
            if not job.is_task:
                self._worker.abort(job.taken.lease)
            self._bell.capacity_freed()
        self._schedule(job)

    def end_as(self, job_id: str, answer: str) -> None:
        """End a job as Redis answered: CANCEL, EXPIRED or UNREAD."""
        if (job := self._ledger.get(job_id)) is not None:
            self.end(job, BY_ANSWER[answer])

    def forget(self, job: HeldJob) -> None:
        """Stop holding a job, and abort it in the engine."""
        self._remove(job)
        self._dirty.pop(job.taken.lease, None)
        self._worker.abort(job.taken.lease)
        self._bell.capacity_freed()

    def drop(self, job: HeldJob) -> None:
        """Stop holding a job that belongs to another node now."""
        self._ledger.reports.lost(job)
        self.forget(job)
        self._ledger.counts.dropped += 1
        log.warning("job belongs to another node", extra={"job_id": job.job_id, "lease": job.taken.lease})

    def end_expired(self, now_s: float) -> None:
        """End jobs past their deadline, including those without new tokens to publish."""
        for job_id in self._ledger.expired(now_s):
            self.end_as(job_id, "EXPIRED")

    def handle_beat(self, answer: HeartbeatAnswer) -> None:
        """Drop and end the jobs that the answer to a heartbeat names."""
        for job_id in answer.fenced:
            if (job := self._ledger.get(job_id)) is not None and job.outcome is None:
                self.drop(job)
        for job_id in answer.cancelled:
            self.end_as(job_id, "CANCEL")
        for job_id in answer.expired:
            self.end_as(job_id, "EXPIRED")

    async def until_empty(self) -> None:
        """Wait until the node holds no job."""
        while len(self._ledger):
            self._emptied.clear()
            await self._emptied.wait()

    async def run(self) -> None:
        """Publish until canceled; retries while Redis is unavailable."""
        patience = pauses()
        while True:
            await self._alarm.wait()
            self._sleeping = False
            self._collect()
            if not self._dirty:
                # The alarm was set for streams that have ended since, have no new tokens yet, or were dropped.
                self._pause_engine_if_full()
                continue
            only_awaited = self._pace.until_next_s(len(self._dirty), self._loop.time()) > 0
            try:
                await self.flush(only_awaited=only_awaited)
                patience = pauses()
            except UnavailableError as error:
                self._ledger.counts.outages += 1
                self._pause_engine_if_full()
                log.warning("redis is unreachable", extra={"reason": error.message})
                await asyncio.sleep(next(patience))
            self._pause_engine_if_full()
            self._set_alarm()

    async def flush(self, *, only_awaited: bool = False) -> None:
        """Publish all unsent outputs now. Raises UnavailableError; what Redis has not acknowledged stays unsent."""
        self._collect()
        batch = [job for job in self._dirty.values() if not only_awaited or job.is_awaited]
        # Also cleared when nothing leaves now: the awaited output may be in flight, or its job dropped.
        self._reader_waits = False
        if not batch:
            return
        self._pace.note(self._loop.time(), num_streams=None if only_awaited else len(batch))
        for job in batch:
            del self._dirty[job.taken.lease]
        try:
            calls = [partial(self._finish, job, job.outcome) for job in batch if job.outcome is not None]
            going = [job for job in batch if job.outcome is None]
            if at_once := [job for job in going if not job.has_unsealed_prompt]:
                calls.append(partial(self._emit, at_once))
            calls += [partial(self._emit, [job]) for job in going if job.has_unsealed_prompt]
            for start in range(0, len(calls), MAX_CALLS_AT_ONCE):
                await gather_all(*(call() for call in calls[start : start + MAX_CALLS_AT_ONCE]))
        except BaseException:
            for job in batch:
                if self._ledger.of_lease(job.taken.lease) is not None:
                    self._dirty.setdefault(job.taken.lease, job)
            raise

    async def _seal(self, job: HeldJob) -> None:
        """Pack a prompt's log-probabilities, and yield to the event loop after each part."""
        while job.has_unsealed_prompt:
            job.seal_part(self._pack)
            await self._yielder.wait()

    async def _emit(self, jobs: list[HeldJob]) -> None:
        for job in jobs:
            await self._seal(job)
        while jobs:
            emissions = [job.emission(self._pack, MAX_EMIT_BYTES) for job in jobs]
            jobs = []
            for batch in emit_batches(emissions):
                jobs += await self._emit_batch(batch)

    async def _emit_batch(self, batch: list[Emission]) -> list[HeldJob]:
        """Emit in one call. Return the jobs of which more chunks must follow."""
        began_s = self._loop.time()
        answers = await self._broker.emit(batch)
        self._ledger.counts.emits.note(self._loop.time() - began_s)
        unfinished = list[HeldJob]()
        for emission, answer in zip(batch, answers, strict=True):
            if (job := self._ledger.of_lease(emission.lease)) is not None:
                self._handle_answer(job, emission, answer)
                if answer == "OK" and job.outcome is None and not job.is_rest(emission):
                    unfinished.append(job)
        return unfinished

    def _handle_answer(self, job: HeldJob, emission: Emission, answer: str) -> None:
        if self._handle_loss(job, answer):
            return
        kind, _, rest = answer.partition(" ")
        job.acknowledge(emission)
        if job.trace is not None:
            self._ledger.reports.began(job)
        if kind == "ERR":
            log.error("emit failed", extra={"job_id": job.job_id, "reason": rest})
            self.end(job, Outcome("failed", "internal_error", "the queue could not store this job's tokens"))
        elif kind != "OK":
            self.end(job, BY_ANSWER[kind])

    def _handle_loss(self, job: HeldJob, answer: str) -> bool:
        """Drop a job that this node has lost, or send again the chunks that Redis has lost. Return whether it did."""
        kind, _, rest = answer.partition(" ")
        if kind in ("FENCED", "GONE"):
            self.drop(job)
        elif kind == "NEED":
            self._send_again(job, int(rest))
        else:
            return False
        return True

    async def _finish(self, job: HeldJob, outcome: Outcome) -> None:
        await self._seal(job)
        while (emission := job.emission(self._pack, MAX_EMIT_BYTES)).progress or not job.is_rest(emission):
            (answer,) = await self._broker.emit([emission])
            if self._handle_loss(job, answer):
                return
            # The job has its outcome, so a cancellation changes nothing. The finish call reports damaged keys.
            job.acknowledge(emission)
        try:
            answer = await self._broker.finish(emission, outcome, job.result(), **job.used)
        except InvariantError as error:
            # This job's keys are damaged; other jobs' keys are not.
            log.error("finish failed", extra={"job_id": job.job_id, "reason": error.message})
            answer = "GONE"
        if not self._handle_loss(job, answer):
            self._ledger.count_finished(job, outcome, time.monotonic())
            self._remove(job)

    def _send_again(self, job: HeldJob, index: int) -> None:
        self._ledger.counts.rewinds += 1
        job.send_again_from(index)
        self._schedule(job)

    def _remove(self, job: HeldJob) -> None:
        self._ledger.remove(job)
        if not len(self._ledger):
            self._emptied.set()
            self._bell.capacity_freed()  # A suspect job may be waiting for a node that holds no other job.

    def _pause_engine_if_full(self) -> None:
        self._worker.set_paused(self._ledger.unsent_bytes > self.max_unsent_bytes)
