"""From the engine to Redis: one emit call for the whole batch, and one finish call for all jobs that ended.

While Redis is unavailable or slow, outputs accumulate in the held jobs; then each choice's output leaves as one chunk.
Tokens also wait where sending would take too much CPU time (`Pace`); until they leave, steps do not wake the event
loop. Most sends are one call without a task (`QuickEmit`); `flush` does the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace

from penstock.contract.errors import DamagedDataError, InvariantError, UnavailableError
from penstock.contract.output import Outcome
from penstock.contract.retries import OUTPUT_REJECTED
from penstock.gpu_node.engine.records import StepOutput
from penstock.gpu_node.engine.worker import EngineWorker
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.jobs.held_jobs import HeldJobs, JobReports
from penstock.gpu_node.jobs.outcomes import BY_ANSWER, failure_of, outcome_of
from penstock.gpu_node.publishing.attempts import Attempts
from penstock.gpu_node.publishing.ended_jobs import EndedJobs
from penstock.gpu_node.publishing.sending import Alarm, BatchSender, Pace, QuickEmit
from penstock.queue.broker.connection import pauses
from penstock.queue.broker.node import Emission, HeartbeatAnswer, JobEnd, NodeBroker

log = logging.getLogger(__package__)


ENDS_PER_PART = 32
"""Ends of background jobs that one call sends. The first token of a chat waits for no more of them."""


class Outbox:
    """The publisher of a node's tokens and job ends. It calls `capacity_freed` when a job has freed capacity.

    `ends`: what gets the ends that Redis has stored, and what gives jobs further attempts.
    """

    def __init__(
        self,
        broker: NodeBroker,
        held_jobs: HeldJobs,
        worker: EngineWorker,
        reports: JobReports,
        capacity_freed: Callable[[], None],
        ends: tuple[EndedJobs, Attempts],
        *,
        max_unsent_bytes: int,
        pace: Pace,
    ) -> None:
        self._held_jobs = held_jobs
        self._worker = worker
        self._reports = reports
        self.max_unsent_bytes = max_unsent_bytes
        self._pace = pace
        self._capacity_freed = capacity_freed
        self._ended_jobs, self._attempts = ends
        self._settling = set[asyncio.Task[None]]()
        self._loop = asyncio.get_running_loop()
        self._delivered: deque[tuple[float, Sequence[StepOutput]]] = deque()
        """Outputs that the event loop has not handled, each with the time of its step."""
        self._sleeping = False
        """Whether delivered outputs may wait for the alarm or the answers, unless a reader waits for one of them."""
        self._alarm = Alarm(self._send_due)
        self._quick = QuickEmit(broker, held_jobs.counts, pace.cost, on_answers=self._receive, on_idle=self._send_due)
        self._batch_sender = BatchSender(broker, held_jobs, self)
        self._needs_flush = asyncio.Event()
        self._is_flushing = self._has_failed = False
        """Whether `run` flushes or pauses after a failure; whether a quick call failed since the last flush."""
        self._last_step_s = self._step_s = 0.0  # when it had outputs; the time since the step before
        # Keyed by id: job id.
        self._dirty: dict[str, HeldJob] = {}
        self._reader_waits = False
        """Whether a reader waits for an unsent first token or an unsent end."""
        self._emptied = asyncio.Event()
        # Keyed by id: lease.
        self._waiters: dict[str, asyncio.Future[None]] = {}
        """Callers of `until_removed`, by lease."""

    def deliver(self, outputs: Sequence[StepOutput]) -> None:
        """Accept one step's outputs. Runs on the engine's thread. Raises RuntimeError if the loop is closed."""
        self._delivered.append((time.monotonic(), outputs))
        if not self._sleeping or any(output.is_first_or_last for output in outputs):
            self._loop.call_soon_threadsafe(self._send_due)

    def _collect(self) -> None:
        while self._delivered:
            at_s, outputs = self._delivered.popleft()
            self._step_s, self._last_step_s = at_s - self._last_step_s, at_s
            self._accept_step(at_s, outputs)

    def _send_due(self) -> None:
        """Accept the delivered outputs, and send what is due."""
        self._sleeping = False
        self._collect()
        if self._worker.is_paused:
            self._pause_engine_if_full()
        self._send_or_wait()

    def _send_or_wait(self) -> None:
        """Send what is due, or set the alarm for the time at which it is."""
        if self._quick.is_in_flight or self._is_flushing or self._needs_flush.is_set():
            return  # When that is done, `_send_due` follows.
        now_s = self._loop.time()
        delay_s = self._pace.until_next_s(len(self._dirty), now_s, reader_waits=self._reader_waits)
        if delay_s > 0:
            # If no tokens wait, and the next step comes later than they may leave, that step wakes the event loop.
            if self._dirty or self._step_s < delay_s:
                self._alarm.set(delay_s)
                self._sleeping = True
        elif self._dirty:
            self._send(only_awaited=self._pace.until_next_s(len(self._dirty), now_s) > 0)

    def _send(self, *, only_awaited: bool) -> None:
        if any(job.outcome is not None for job in self._dirty.values()):
            self._needs_flush.set()
        elif not (batch := self._take_batch(only_awaited=only_awaited)):
            self._send_or_wait()  # No reader waits after all.
        elif self._quick.start(batch):
            self._sleeping = True
        else:
            self._take_back(batch)
            self._has_failed = True
            self._needs_flush.set()

    def _take_batch(self, *, only_awaited: bool) -> list[HeldJob]:
        """Remove and return the unsent jobs that leave now."""
        batch = [job for job in self._dirty.values() if not only_awaited or job.is_awaited]
        # Also cleared when nothing leaves now: the awaited output may be in flight, or its job dropped.
        self._reader_waits = False
        if batch:
            self._pace.note(self._loop.time(), num_streams=None if only_awaited else len(batch))
        for job in batch:
            del self._dirty[job.taken.lease]
        return batch

    def _take_back(self, batch: Sequence[HeldJob]) -> None:
        """Mark jobs as unsent again, except those that are no longer held."""
        for job in batch:
            if self._held_jobs.of_lease(job.taken.lease) is not None:
                self._dirty.setdefault(job.taken.lease, job)

    def _receive(self, batch: Sequence[HeldJob], emissions: Sequence[Emission], answers: Sequence[str] | None) -> None:
        """Handle the answers of a quick call."""
        if answers is None:
            self._has_failed = True
            self._take_back(batch)
            self._needs_flush.set()
            return
        for emission, answer in zip(emissions, answers, strict=True):
            self.handle_answer(emission, answer)

    def _accept_step(self, at_s: float, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            job = self._held_jobs.of_lease(output.request_id)
            if job is None or job.outcome is not None or job.is_settling:
                continue
            try:
                self._accept(job, output, at_s)
            except InvariantError as error:
                log.exception("engine and held jobs disagree", extra={"job_id": job.job_id})
                self.end(job, Outcome("failed", error.code, error.message))
            self._mark_dirty(job)

    def _mark_dirty(self, job: HeldJob) -> None:
        self._dirty[job.taken.lease] = job
        self._reader_waits = self._reader_waits or job.is_awaited

    def _schedule(self, job: HeldJob) -> None:
        self._mark_dirty(job)
        self._send_or_wait()

    def _accept(self, job: HeldJob, output: StepOutput, at_s: float) -> None:
        if output.prefill is not None:
            job.prefill = output.prefill
            return
        if output.finish_reason == "error" and self._tries_again(job, failure_of(job, output.error)):
            return
        job.add_tokens(output)
        if output.token_ids:
            self._held_jobs.counts.jobs.generated(job.taken.priority, job.times, output.choice, at_s)
        if output.finish_reason is None:
            return
        if job.is_complete:
            self._held_jobs.learn(job)
            self._complete(job)
            self._capacity_freed()

    def end_complete(self, job: HeldJob) -> None:
        """End a job whose choices have all ended, as its log says."""
        self._complete(job)
        if job.outcome is not None:
            self._schedule(job)

    def _complete(self, job: HeldJob) -> None:
        outcome = outcome_of(job)
        if job.check is None or outcome.state != "succeeded":
            job.outcome = outcome
        else:
            self._end_later(job, self._check(job, outcome))

    async def _check(self, job: HeldJob, outcome: Outcome) -> None:
        """Check the output of a complete job, whose tokens go to its readers meanwhile, and end the job."""
        refusal, successor = await self._attempts.refusal_of(job), None
        if refusal is not None and self._attempts.may_follow(job, refusal.code) and refusal.code == OUTPUT_REJECTED:
            successor = await self._attempts.successor_of(job)
        if job.outcome is None:
            job.successor = successor
            self.end(job, outcome if refusal is None else refusal)

    def fail(self, job: HeldJob, outcome: Outcome) -> None:
        """End a job that this node failed at, unless it has another attempt."""
        if not self._tries_again(job, outcome):
            self.end(job, outcome)

    def _tries_again(self, job: HeldJob, outcome: Outcome) -> bool:
        """Return a job to the queue that an error of this node ended, if it may have another attempt."""
        is_held = self._held_jobs.of_lease(job.taken.lease) is not None
        if not is_held or job.outcome is not None or not self._attempts.may_follow(job, outcome.code):
            return False
        self._end_later(job, self._try_again(job, outcome))
        return True

    async def _try_again(self, job: HeldJob, outcome: Outcome) -> None:
        preemptions = 0 if job.is_task else job.num_preemptions + self._worker.num_preemptions(job.taken.lease)
        self._worker.abort(job.taken.lease)
        answer = await self._attempts.give_back(job, outcome.code, preemptions)
        if self._held_jobs.of_lease(job.taken.lease) is None:
            return
        if answer == "KEEP":
            self.end(job, outcome)
        elif answer == "OK":
            self._reports.gave_back(job, "failed")
            self.forget(job)
            self._held_jobs.counts.gave_back("failed", 1)
            log.info("a job has another attempt", extra={"job_id": job.job_id, "code": outcome.code})
        else:
            self.drop(job)

    def _end_later(self, job: HeldJob, work: Coroutine[None, None, None]) -> None:
        job.is_settling = True
        task = asyncio.create_task(work, name=f"penstock end of {job.job_id}")
        self._settling.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._settling.discard(task)
            job.is_settling = False
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("the end of a job failed", extra={"job_id": job.job_id}, exc_info=error)
                self.end(job, Outcome("failed", "internal_error", "the node failed at the end of this job"))

        task.add_done_callback(done)

    def close(self) -> None:
        """End the work beside the tokens. The jobs that it was for return to the queue with this node's lease."""
        for task in self._settling:
            task.cancel()
        self._attempts.close()

    def end(self, job: HeldJob, outcome: Outcome) -> None:
        """End a job early, with the output so far; no effect if it is no longer held."""
        if self._held_jobs.of_lease(job.taken.lease) is None:
            return
        if job.outcome is None:
            job.outcome = outcome
            if not job.is_task:
                job.num_preemptions += self._worker.num_preemptions(job.taken.lease)
                self._worker.abort(job.taken.lease)
            self._capacity_freed()
        self._schedule(job)

    def end_as(self, job_id: str, answer: str) -> None:
        """End a job as Redis answered: CANCEL, EXPIRED or UNREAD."""
        if (job := self._held_jobs.get(job_id)) is not None:
            self.end(job, BY_ANSWER[answer])

    def forget(self, job: HeldJob) -> None:
        """Stop holding a job, and abort it in the engine."""
        self._remove(job)
        self._worker.abort(job.taken.lease)
        self._capacity_freed()

    def drop(self, job: HeldJob) -> None:
        """Stop holding a job that belongs to another node now."""
        self._reports.lost(job)
        self.forget(job)
        self._held_jobs.counts.dropped += 1
        log.warning("job belongs to another node", extra={"job_id": job.job_id, "lease": job.taken.lease})

    def end_expired(self, now_s: float) -> None:
        """End jobs past their deadline, including those without new tokens to publish."""
        for job_id in self._held_jobs.expired(now_s):
            self.end_as(job_id, "EXPIRED")

    def handle_heartbeat_answer(self, answer: HeartbeatAnswer) -> None:
        """Drop and end the jobs that the answer to a heartbeat names."""
        for job_id in answer.fenced:
            if (job := self._held_jobs.get(job_id)) is not None and job.outcome is None:
                self.drop(job)
        for job_id in answer.cancelled:
            self.end_as(job_id, "CANCEL")
        for job_id in answer.expired:
            self.end_as(job_id, "EXPIRED")

    async def until_removed(self, job: HeldJob) -> None:
        """Wait until the node does not hold a job any more. Only one caller may wait for a job."""
        if self._held_jobs.of_lease(job.taken.lease) is not None:
            await self._waiters.setdefault(job.taken.lease, self._loop.create_future())

    async def until_empty(self) -> None:
        """Wait until the node holds no job."""
        while len(self._held_jobs):
            self._emptied.clear()
            await self._emptied.wait()

    async def run(self) -> None:
        """Flush what a quick call cannot send, until canceled. Retries while Redis is unavailable."""
        patience = pauses()
        while True:
            await self._needs_flush.wait()
            self._is_flushing = True
            self._needs_flush.clear()
            self._sleeping = False
            is_early = self._pace.until_next_s(len(self._dirty), self._loop.time()) > 0
            try:
                await self.flush(only_awaited=is_early and not self._has_failed)
                patience, self._has_failed = pauses(), False
                self._held_jobs.round_done("emit")
            except DamagedDataError as error:
                self._held_jobs.round_failed("emit", error)
                self._pause_engine_if_full()
                self._needs_flush.set()
                await asyncio.sleep(next(patience))
            except UnavailableError as error:
                self._held_jobs.counts.outages += 1
                self._pause_engine_if_full()
                self._held_jobs.redis_failed("emit", error)
                await asyncio.sleep(next(patience))
            self._pause_engine_if_full()
            self._is_flushing = False
            self._send_due()

    async def flush(self, *, only_awaited: bool = False) -> None:
        """Publish all unsent outputs, or the awaited ones. Raises UnavailableError; the unacknowledged stay unsent.

        Ends of background jobs go last, in parts. What a reader of foreground work waits for goes before each part.
        """
        self._collect()
        left = self._take_batch(only_awaited=only_awaited)
        while left:
            left.sort(key=_may_go_later)
            num_first = bisect_left(left, True, key=_may_go_later)
            part, left = left[: num_first + ENDS_PER_PART], left[num_first + ENDS_PER_PART :]
            try:
                await self._batch_sender.send(part)
            except BaseException:
                self._take_back([*part, *left])
                raise
            # Other work runs between these calls, so their own CPU time is not known.
            self._held_jobs.counts.sending.note(len(part), self._pace.cost.of(len(part)))
            if left:
                self._collect()
                left += self._take_awaited_foreground()

    def _take_awaited_foreground(self) -> list[HeldJob]:
        batch = [job for job in self._dirty.values() if job.is_awaited and not job.taken.is_background]
        for job in batch:
            del self._dirty[job.taken.lease]
        return batch

    def handle_answer(self, emission: Emission, answer: str) -> None:
        """Handle Redis's answer to an emission, unless its job was lost meanwhile."""
        if (job := self._held_jobs.of_lease(emission.lease)) is None or self.handle_loss(job, answer):
            return
        kind, _, rest = answer.partition(" ")
        job.acknowledge(emission)
        if job.trace is not None:
            self._reports.began(job)
        if kind == "ERR":
            log.error("emit failed", extra={"job_id": job.job_id, "reason": rest})
            self.end(job, Outcome("failed", "internal_error", "the queue could not store this job's tokens"))
        elif kind != "OK":
            self.end(job, BY_ANSWER[kind])

    def handle_loss(self, job: HeldJob, answer: str) -> bool:
        """Drop a job that this node has lost, or send again the chunks that Redis has lost. Return whether it did."""
        kind, _, rest = answer.partition(" ")
        if kind in ("FENCED", "GONE"):
            self.drop(job)
        elif kind == "NEED":
            self._held_jobs.counts.rewinds += 1
            job.send_again_from(int(rest))
            self._schedule(job)
        else:
            return False
        return True

    def ended(self, job: HeldJob, end: JobEnd) -> None:
        """Stop holding a job whose end Redis has stored, and keep the end for a while."""
        now_s = time.monotonic()
        self._reports.ended(job, self._held_jobs.count_finished(job, end.outcome, now_s), now_s)
        if (log_of_job := job.whole_log()) is not None:
            self._ended_jobs.keep(replace(end, last=log_of_job))
        self._remove(job)

    async def compare(self) -> None:
        """Compare what this node knows with a Redis that may have lost writes. Raises UnavailableError.

        Lost ends are repeated. An emission of each held job, also of one without new tokens, tells what its log lacks.
        """
        await self._ended_jobs.repeat()
        for job in self._held_jobs:
            self._mark_dirty(job)
        self._has_failed = True
        self._needs_flush.set()

    def _remove(self, job: HeldJob) -> None:
        self._held_jobs.remove(job)
        if (waiter := self._waiters.pop(job.taken.lease, None)) is not None and not waiter.done():
            waiter.set_result(None)
        # An end that arrived during the finish call marked the job again.
        self._dirty.pop(job.taken.lease, None)
        if not len(self._held_jobs):
            self._emptied.set()
            self._capacity_freed()  # An isolated job may wait for a node that holds no other job.

    def _pause_engine_if_full(self) -> None:
        self._worker.set_paused(self._held_jobs.unsent_bytes > self.max_unsent_bytes)


def _may_go_later(job: HeldJob) -> bool:
    """Return whether this is the end of a background job."""
    return job.taken.is_background and job.outcome is not None
