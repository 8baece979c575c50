"""Sending of chunks to Redis: when, and how many in one call.

The tokens of all streams are sent together, as often as the CPU time for sending allows. Each send wakes the node,
Redis and the readers. That costs CPU time and cache space of the cores on which the engine computes. So the share of a
core that the node spends on sending is limited: the interval between two sends is their expected CPU time divided by
that limit. Where a core is free, the limit is high, and tokens leave at every step. No token waits longer than
`max_interval_s`, whatever that costs.

First tokens and ends leave at once, since readers wait for them. The exception is a burst of them, which would wake all
processes continuously.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from penstock.contract.errors import InvariantError
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.jobs.held_jobs import HeldJobs
from penstock.gpu_node.jobs.times import NodeCounts
from penstock.queue.broker.node import MAX_EMIT_BYTES, MAX_EMIT_JOBS, MAX_FINISH_JOBS, Emission, JobEnd, NodeBroker
from penstock.queue.wire import new_pack
from penstock.runtime.event_loop import LoopYielder, gather_all

log = logging.getLogger(__package__)


class Alarm:
    """A timer that rings at the earliest time set since its last ring. It belongs to the running event loop."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        # The alarm keeps the time itself: uvloop returns a handle without one for a time that has nearly come.
        self._rings_at_s = math.inf
        self._on_ring = ring

    def set(self, delay_s: float) -> None:
        """Ring after at most `delay_s` seconds."""
        # Rounded up to milliseconds, the resolution of uvloop's timers: a ring before the time would find nothing due.
        at_s = math.ceil((self._loop.time() + delay_s) * 1000) / 1000
        if self._timer is not None:
            if self._rings_at_s <= at_s:
                return
            self._timer.cancel()
        self._rings_at_s = at_s
        self._timer = self._loop.call_at(at_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._on_ring()


SEND_S = 200e-6
CHUNK_S = 20e-6
"""First estimate: CPU seconds of each send, and of each chunk in it. Measured on busy cores."""
RATE = 0.05
"""Weight of the newest send in the learned ratio."""
MAX_RATIO = 8.0
"""Bound of what one send teaches, since other work of the event loop may fall into its time."""


class SendCost:
    """Expected CPU seconds of a send on the event loop: an estimate times a ratio learned from measured sends."""

    def __init__(self) -> None:
        self._ratio = 1.0

    def of(self, num_chunks: int) -> float:
        """Return the expected CPU seconds of a send with this number of chunks."""
        return self._ratio * (SEND_S + num_chunks * CHUNK_S)

    def note(self, num_chunks: int, cpu_s: float) -> None:
        """Learn from a send that took `cpu_s`."""
        ratio = cpu_s / (SEND_S + num_chunks * CHUNK_S)
        self._ratio += RATE * (min(ratio, MAX_RATIO) - self._ratio)


BUSY_SHARE = 0.03
"""Share of a core that a node may spend on sending while its engine computes on all cores."""
FREE_SHARE = 0.25
"""The same if the engine leaves a core free. The core also runs Redis and a gateway, which take three times as much."""
FEW_STREAMS, FEW_INTERVAL_S = 16, 0.02
MANY_STREAMS, MANY_INTERVAL_S = 64, 0.05
"""Longest intervals for these numbers of streams. 20 ms is faster than a screen displays tokens."""
MAX_SHARE_S = 0.01
"""Time that one send counts for, so that first tokens and ends cause at most 100 a second. With few streams it
counts for less, since it then delays little."""
MAX_STREAMS_PER_S = 800
MAX_AHEAD_S = 0.07
"""First tokens and ends wait once this much time is booked: after eight sends, or more with few streams."""


def max_interval_s(num_streams: int) -> float:
    """Return the longest interval between two sends: constant for few streams, then growing with their number."""
    slope_s = (MANY_INTERVAL_S - FEW_INTERVAL_S) / (MANY_STREAMS - FEW_STREAMS)
    return FEW_INTERVAL_S + max(0, num_streams - FEW_STREAMS) * slope_s


class Pace:
    """Times of sends, in seconds on a monotonic clock.

    First tokens and ends are paced by the generic cell rate algorithm (ITU-T I.371). Each send books its share of
    time after the earlier ones. A first token or end waits while more than MAX_AHEAD_S is booked.
    """

    def __init__(self, longest_interval_s: float, *, max_cpu_share: float) -> None:
        """`longest_interval_s`: longest time that a token waits. `max_cpu_share`: share of a core for sending."""
        self._longest_interval_s = longest_interval_s
        self.max_cpu_share = max_cpu_share
        self.cost = SendCost()
        self._all_sent_s = self._booked_until_s = -math.inf
        self._num_streams = 0

    def interval_s(self, num_streams: int = 0) -> float:
        """Return the interval between two sends. The streams of the last send count too."""
        num_streams = max(num_streams, self._num_streams)
        affordable_s = self.cost.of(num_streams) / self.max_cpu_share
        return min(self._longest_interval_s, max_interval_s(num_streams), affordable_s)

    def until_next_s(self, num_pending: int, now_s: float, *, reader_waits: bool = False) -> float:
        """Return the seconds until `num_pending` streams are sent together; 0 or less: now.

        `reader_waits`: until first tokens and ends may be sent. The streams of the last send count too, even if
        only few have new tokens yet, since the others will have some soon.
        """
        due_s = self._all_sent_s + self.interval_s(num_pending)
        if reader_waits:
            due_s = min(due_s, self._booked_until_s - MAX_AHEAD_S)
        return due_s - now_s

    def note(self, now_s: float, *, num_streams: int | None) -> None:
        """Note a send to `num_streams` streams; None: only of first tokens and ends."""
        if num_streams is not None:
            self._all_sent_s = now_s
            self._num_streams = num_streams
        share_s = min(MAX_SHARE_S, self._num_streams / MAX_STREAMS_PER_S)
        self._booked_until_s = min(max(self._booked_until_s, now_s), now_s + MAX_AHEAD_S) + share_s


def new_pace(longest_interval_s: float, *, leaves_core_free: bool) -> Pace:
    """Return the pace of a node whose engine leaves a core free or computes on all of them."""
    return Pace(longest_interval_s, max_cpu_share=FREE_SHARE if leaves_core_free else BUSY_SHARE)


MAX_CALLS_AT_ONCE = 16
"""Emit and finish calls that may be in flight together."""


class EndingJob(NamedTuple):
    """A job and its end as a finish call takes it."""

    job: HeldJob
    end: JobEnd


class AnswerHandler(Protocol):
    """Handles Redis's answers to emit and finish calls."""

    def handle_answer(self, emission: Emission, answer: str) -> None:
        """Handle the answer to an emission, unless its job was lost meanwhile."""

    def handle_loss(self, job: HeldJob, answer: str) -> bool:
        """Drop a lost job, or send again the chunks that Redis has lost. Return whether it did."""

    def ended(self, job: HeldJob, end: JobEnd) -> None:
        """Stop holding a job whose end Redis has stored."""


class BatchSender:
    """Sends batches of jobs: one emit call for running jobs, and finish calls of many for the ended ones.

    Several calls may be in flight together.
    """

    def __init__(self, broker: NodeBroker, held_jobs: HeldJobs, answers: AnswerHandler) -> None:
        self._broker = broker
        self._held_jobs = held_jobs
        self._answers = answers
        self._pack = new_pack()
        self._yielder = LoopYielder()

    async def send(self, batch: Sequence[HeldJob]) -> None:
        """Send everything that these jobs have. Raises UnavailableError; the calls that succeeded are noted."""
        going = [job for job in batch if job.outcome is None]
        at_once = [job for job in going if not job.has_unsealed_prompt]
        ends, long_ends = self._ends_of([job for job in batch if job.outcome is not None])
        calls = [partial(self._emit, at_once)] if at_once else []
        calls += [partial(self._finish_together, part) for part in end_batches(ends)]
        calls += [partial(self._finish, job) for job in long_ends]
        calls += [partial(self._emit, [job]) for job in going if job.has_unsealed_prompt]
        if len(calls) == 1:
            await calls[0]()
            return
        for start in range(0, len(calls), MAX_CALLS_AT_ONCE):
            await gather_all(*(call() for call in calls[start : start + MAX_CALLS_AT_ONCE]))

    def _ends_of(self, ended: Iterable[HeldJob]) -> tuple[list[EndingJob], list[HeldJob]]:
        """Return the ends that go together, and the jobs that have more to send than one call takes."""
        ends, others = list[EndingJob](), list[HeldJob]()
        for job in ended:
            if job.has_unsealed_prompt or job.prefill is not None or job.unsent_bytes > MAX_EMIT_BYTES:
                others.append(job)
                continue
            emission = job.emission(self._pack, MAX_EMIT_BYTES)
            if job.is_rest(emission):
                ends.append(EndingJob(job, _end_of(job, emission)))
            else:
                others.append(job)
        return ends, others

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
        began_s = time.monotonic()
        answers = await self._broker.emit(batch)
        self._held_jobs.counts.emits.note(time.monotonic() - began_s)
        unfinished = list[HeldJob]()
        for emission, answer in zip(batch, answers, strict=True):
            if (job := self._held_jobs.of_lease(emission.lease)) is not None:
                self._answers.handle_answer(emission, answer)
                if answer == "OK" and job.outcome is None and not job.is_rest(emission):
                    unfinished.append(job)
        return unfinished

    async def _finish(self, job: HeldJob) -> None:
        """End a job that may have more to send than one call takes."""
        await self._seal(job)
        while (emission := job.emission(self._pack, MAX_EMIT_BYTES)).progress or not job.is_rest(emission):
            (answer,) = await self._broker.emit([emission])
            if self._answers.handle_loss(job, answer):
                return
            # The job has its outcome, so a cancellation changes nothing. The finish call reports damaged keys.
            job.acknowledge(emission)
        await self._finish_together([EndingJob(job, _end_of(job, emission))])

    async def _finish_together(self, ends: Sequence[EndingJob]) -> None:
        try:
            answers = await self._broker.finish_many([end for _, end in ends])
        except InvariantError as error:
            if len(ends) > 1:
                # One of these jobs, or what they share, is damaged. Those that have ended already are answered with OK.
                for one in ends:
                    await self._finish_together([one])
                return
            answers = [f"ERR {error.message}"]
        for (job, end), answer in zip(ends, answers, strict=True):
            if answer.startswith("ERR "):
                # This job's keys are damaged; other jobs' keys are not.
                log.error("finish failed", extra={"job_id": job.job_id, "reason": answer.removeprefix("ERR ")})
                answer = "GONE"
            if not self._answers.handle_loss(job, answer):
                self._answers.ended(job, end)


def _end_of(job: HeldJob, last: Emission) -> JobEnd:
    if job.outcome is None:
        raise InvariantError(f"{job.job_id} has not ended")
    return JobEnd(last, job.outcome, job.result(), job.used, job.successor)


OnAnswers = Callable[[Sequence[HeldJob], Sequence[Emission], Sequence[str] | None], None]
"""Called with the answers to the emissions of these jobs; None: the call failed."""


class QuickEmit:
    """The fast path: emits what running jobs have, by one call whose answers are handled without waking a task.

    It learns what a call costs. The outbox does what needs more: ended jobs, long prompts to pack, large backlogs, and
    failed calls.
    """

    def __init__(
        self,
        broker: NodeBroker,
        counts: NodeCounts,
        cost: SendCost,
        *,
        on_answers: OnAnswers,
        on_idle: Callable[[], None],
    ) -> None:
        """`on_answers` handles the answers, `on_idle` may start the next call. Neither may raise."""
        self._broker = broker
        self._counts = counts
        self._cost = cost
        self._on_answers = on_answers
        self._on_idle = on_idle
        self._pack = new_pack()
        self.is_in_flight = False
        """Whether a call is unanswered, or its answers are being handled."""

    def start(self, jobs: Sequence[HeldJob]) -> bool:
        """Send what these jobs have. Return False if nothing was sent."""
        if self.is_in_flight or not fits_one_call(len(jobs), 0):
            return False
        if any(job.outcome is not None or job.has_unsealed_prompt for job in jobs):
            return False
        began_s, cpu_s = time.monotonic(), time.thread_time()
        emissions = [job.emission(self._pack) for job in jobs]
        if not fits_one_call(len(emissions), sum(map(size_of, emissions))):
            return False

        def receive(answers: Sequence[str] | None) -> None:
            self._counts.emits.note(time.monotonic() - began_s)
            self._on_answers(jobs, emissions, answers)
            if answers is not None:
                # This includes other work of the event loop in that time, which is little compared with a send.
                spent_s = time.thread_time() - cpu_s
                self._cost.note(len(jobs), spent_s)
                self._counts.sending.note(len(jobs), spent_s)
            self.is_in_flight = False
            self._on_idle()

        self.is_in_flight = self._broker.start_emit(emissions, receive)
        return self.is_in_flight


def fits_one_call(num_jobs: int, num_bytes: int) -> bool:
    """Return whether the emissions of so many jobs, with so many bytes of chunks, may share one emit call."""
    return num_jobs <= MAX_EMIT_JOBS and num_bytes <= MAX_EMIT_BYTES


def size_of(emission: Emission) -> int:
    """Return the bytes of an emission's chunks."""
    return sum(map(len, emission.chunks))


def emit_batches(emissions: Iterable[Emission]) -> list[list[Emission]]:
    """Split emissions into emit calls, by number of jobs and by bytes. A larger emission has a call of its own."""
    batches: list[list[Emission]] = []
    num_bytes = 0
    for emission in emissions:
        size = size_of(emission)
        if not batches or not fits_one_call(len(batches[-1]) + 1, num_bytes + size):
            batches.append([])
            num_bytes = 0
        batches[-1].append(emission)
        num_bytes += size
    return batches


def end_batches(ends: Iterable[EndingJob]) -> list[list[EndingJob]]:
    """Split ends into finish calls, by number of jobs and by bytes. A larger end has a call of its own."""
    batches: list[list[EndingJob]] = []
    num_bytes = 0
    for one in ends:
        size = one.end.num_bytes
        if not batches or len(batches[-1]) == MAX_FINISH_JOBS or num_bytes + size > MAX_EMIT_BYTES:
            batches.append([])
            num_bytes = 0
        batches[-1].append(one)
        num_bytes += size
    return batches
