"""The asynchronous handle on a job: its stream, its result and its end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from penstock.contract.channel import Channel
from penstock.contract.errors import NotFoundError, RequestError, ResultTimeoutError, UnavailableError, error_of
from penstock.contract.job import JobDef, pool_of
from penstock.contract.output import Chunk, Outcome, Result, WaitUpdate
from penstock.contract.retries import OUTPUT_REJECTED
from penstock.producer.client.confirmed_reads import ConfirmedReads
from penstock.producer.client.inbox import ClientInbox
from penstock.producer.client.kept import KeptSubmission
from penstock.producer.client.mailbox import Mailbox, QueueWatch, WaitWatcher
from penstock.producer.client.stream import ChunkSink, Hold, StreamCursor, StreamReader
from penstock.queue import keys
from penstock.queue.broker.producer import Attached, JobStatus, ProducerBroker
from penstock.queue.results import Fetches, PackedResult
from penstock.runtime import crash_points


class JobSource:
    """The state, log and result of one job.

    If this process submitted the job and Redis lost it, it is submitted again: same id, same bytes. That needs its
    request, which is dropped where the client keeps too many.
    """

    def __init__(
        self,
        broker: ProducerBroker,
        inbox: ClientInbox,
        queue_watch: QueueWatch,
        job_id: str,
        tenant: str,
        kept: KeptSubmission | None = None,
        *,
        job: JobDef | None = None,
        reads: ConfirmedReads | None = None,
    ) -> None:
        """`kept` and `job` are those of a job that this process submitted. `reads`: what its readers wait for."""
        self._broker = broker
        self._inbox = inbox
        self._queue_watch = queue_watch
        self.job_id = job_id
        self.tenant = tenant
        self._kept = kept
        self.is_background = None if job is None else job.background
        """Whether the job continues without a reader; None if another process submitted it."""
        self.own_channel: Channel | None = None if job is None else job.channel
        """The channel that this process asks for, each time that it attaches."""
        self.feed = inbox.feed(job_id)
        self._reads = reads
        self.hold: Hold | None = None if reads is None else partial(reads.hold, pool_of(job_id))

    async def check_durability(self) -> None:
        """Raise the error of a Redis that cannot promise what the readers wait for."""
        if self._reads is not None:
            await self._reads.check()

    @property
    def channel(self) -> str | None:
        """The whole name of the channel that this process asked for, or None."""
        own = self.own_channel
        return None if own is None else keys.own_channel(self.job_id, self.tenant, own.name)

    def forget_submission(self) -> None:
        """Give back the memory of the prompt, once the result was read. The job is not submitted again after that."""
        self._kept = None

    async def attach(self) -> Attached:
        """Register this process as a reader, perhaps again, and return the job's state."""
        await self._inbox.wait_for_detach(self.job_id)
        inbox = self._inbox.name
        try:
            attached = await self._broker.attach(self.job_id, self.tenant, inbox=inbox, channel=self.own_channel)
            if not self._inbox.listens_to(pool := pool_of(self.job_id)):
                # Only now, so that ids that name no job add no subscription. The answer above may already be old.
                await self._inbox.listen_to(pool)
                attached = await self._broker.attach(self.job_id, self.tenant, inbox=inbox, channel=self.own_channel)
        except NotFoundError:
            submission = None if self._kept is None else self._kept.submission
            if submission is None or self.feed.ended:
                raise
            self._inbox.stats.resubmits += 1
            attached = await self._broker.submit(submission.repeated(), inbox)
        self.feed.note(attached)
        return attached

    async def receive_published(self) -> None:
        """Wait until everything published before the call is in the mailboxes."""
        with suppress(UnavailableError):
            await self._inbox.receive_published()

    async def log(self, start: int, count: int) -> list[Chunk]:
        """Return up to `count` chunks of the job's log, from index `start`."""
        self._inbox.stats.log_reads += 1
        chunks = await self._confirmed(partial(self._broker.log, self.job_id, start, count))
        crash_points.point("after", "log")
        return chunks

    async def result(self) -> Result | None:
        """Return the job's result, or None before its end."""
        return await self._confirmed(partial(self._broker.result, self.job_id, self.tenant))

    async def successor_of(self, outcome: Outcome) -> JobSource | None:
        """Return the job that took the place of this one, because its output was refused; else None."""
        if outcome.code != OUTPUT_REJECTED:
            return None
        found = await self._broker.successor_of(self.job_id)
        if found is None:
            return None
        source = JobSource(self._broker, self._inbox, self._queue_watch, found, self.tenant, reads=self._reads)
        source.is_background, source.own_channel = self.is_background, self.own_channel
        return source

    async def packed_result(self, fetches: Fetches | None = None) -> PackedResult | None:
        """Return the job's result, with parts that are decoded on access, or None before its end."""
        return await self._confirmed(partial(self._broker.packed_result, self.job_id, self.tenant, fetches))

    async def _confirmed(self, read: Callable[[], Awaitable[Found]]) -> Found:
        """Return what is read from Redis, once it is as safe as the reader asks."""
        return await (read() if self._reads is None else self._reads.read(pool_of(self.job_id), read))

    async def last_packed_result(self) -> PackedResult | None:
        """Return the result of this job or of the one that took its place; None while that one is open."""
        source = self
        while (result := await source.packed_result()) is not None:
            if (successor := await source.successor_of(result.outcome)) is None:
                break
            source = successor
        return result

    async def status(self) -> JobStatus:
        """Return the job's state, for people."""
        status = await self._broker.status(self.job_id, self.tenant)
        if status.state != "queued":
            return status
        return replace(status, queue_position=await self._queue_watch.position_of(self.job_id))

    @contextmanager
    def watched(self) -> Iterator[WaitWatcher]:
        """Open a watcher of the job's wait."""
        watcher = WaitWatcher()
        self.feed.watchers += (watcher,)
        self._queue_watch.add(self.job_id, watcher)
        try:
            yield watcher
        finally:
            self._queue_watch.remove(watcher)
            self.feed.watchers = tuple(one for one in self.feed.watchers if one is not watcher)

    async def ack(self) -> bool:
        """Free the job's result. Return whether this call has freed it."""
        return bool(await self._broker.ack([self.job_id], self.tenant))

    async def cancel(self) -> str:
        """Cancel the job and return its state."""
        return await self._broker.cancel(self.job_id, self.tenant)


Found = TypeVar("Found")
AnyResult = TypeVar("AnyResult", Result, PackedResult)


class OwnCheck(Protocol):
    """A check that this process makes of a job's result."""

    async def next_after(self, result: Result) -> Result | AsyncJob:
        """Return the result if it is accepted or the last one, then as a failed one; else the next attempt's job."""


MIN_TIMEOUT_S = 0.1
"""A shorter timeout is raised to this value, which is long enough to read whether the job has ended."""


def checked_timeout(timeout_s: float | None) -> float | None:
    """Return the seconds of a caller's `timeout`, at least MIN_TIMEOUT_S. Raises RequestError for a wrong one."""
    is_number = isinstance(timeout_s, (int, float)) and not math.isnan(timeout_s)
    if timeout_s is not None and not (is_number and timeout_s >= 0):
        raise RequestError("timeout must be None or a number of seconds, at least 0", param="timeout")
    return None if timeout_s is None else max(timeout_s, MIN_TIMEOUT_S)


def _still_open(job_id: str, timeout_s: float | None, is_background: bool | None) -> ResultTimeoutError:
    goes_on = {
        True: "It goes on",
        False: "It is canceled soon unless it is read again",
        None: "It goes on if it is a background job, and else only while it is read",
    }[is_background]
    how = "wait for it with job.result() or client.result(job_id), or end it with job.cancel() or client.cancel(job_id)"
    return ResultTimeoutError(f"job {job_id} has not ended after {timeout_s} s. {goes_on}: {how}")


class AsyncJob:
    """A handle on a submitted or attached job. Any number of readers may stream from it, each from its start.

    The first mailbox of a submitted job opens before the submission, so the first reader need not read the log. A call
    of `result` uses up that mailbox too; otherwise thousands of handles would keep chunks without a reader.
    """

    def __init__(
        self, source: JobSource, inbox: ClientInbox, *, after: int = -1, first_box: Mailbox | None = None
    ) -> None:
        self._source = source
        self._inbox = inbox
        self._start = after + 1
        self._first_box = first_box
        self.id = source.job_id
        self.pool = pool_of(source.job_id)
        self.tenant = source.tenant
        self.channel = source.channel
        """The channel of Redis on which the chunks are published too, as far as this process asked for it."""
        self._accepts: OwnCheck | None = None
        """The caller's own check of its result."""

    def __repr__(self) -> str:
        return f"<AsyncJob {self.id}>"

    async def stream(self) -> AsyncGenerator[Chunk, None]:
        """Yield the job's chunks in order. After the last chunk, raise the job's error unless it succeeded.

        If the reader leaves early, such as by Ctrl-C, a `background` job goes on, and any other is canceled 5 s later.
        """
        outcome: Outcome | None = None
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                outcome = batch[-1].outcome
                for chunk in batch:
                    yield chunk
        if outcome is not None and outcome.state != "succeeded":
            raise error_of(outcome)

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """Yield the job's chunks in order. The last chunk carries the outcome; a failed job raises no error."""
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                for chunk in batch:
                    yield chunk

    def batches(self, sink: ChunkSink | None = None) -> AsyncGenerator[list[Chunk], None]:
        """Yield the job's chunks in order, in lists of all that have arrived, except those that the sink takes."""
        # A generator around the reader's would double the time that a token takes through the reader.
        cursor = StreamCursor(self._start)
        return StreamReader(self._source, self._box_to_read, cursor, self._inbox.stats, sink).batches()

    async def result(self, *, timeout: float | None = None, check: bool = True) -> Result:  # noqa: ASYNC109
        """Wait for the job's end and return its result. With `check`, raise the job's error unless it succeeded.

        Raises ResultTimeoutError after `timeout` seconds. A job that is `background`, the default of `submit`, goes on
        then; so it does if a cancellation or Ctrl-C ends the wait. `cancel` ends it. A stream that begins later reads
        the earlier chunks from the log.
        """
        limit = asyncio.timeout(checked_timeout(timeout))
        try:
            async with limit:
                return await self._accepted(check=check)
        except TimeoutError:
            if not limit.expired():
                raise
            raise _still_open(self.id, timeout, self._source.is_background) from None

    async def packed_result(self, fetches: Fetches | None = None) -> PackedResult:
        """Wait for the job's end and return its result, with parts that are decoded on access.

        If `fetches` leaves a large result in Redis, the returned one has only its size and the outcome.
        """
        return await self._of_last(lambda job: partial(job._source.packed_result, fetches), check=True)

    async def _accepted(self, *, check: bool) -> Result:
        """Return the result of the last attempt. The caller's own check may ask for another one."""
        job = self
        while True:
            result = await job._of_last(lambda one: one._source.result, check=check)
            if job._accepts is None or result.outcome.state != "succeeded":
                return result
            again = await job._accepts.next_after(result)
            if isinstance(again, Result):
                if check and again.outcome.state != "succeeded":
                    raise error_of(again.outcome)
                return again
            job = again

    async def _of_last(
        self, reader_of: Callable[[AsyncJob], Callable[[], Awaitable[AnyResult | None]]], *, check: bool
    ) -> AnyResult:
        """Return the result of this job, or of the job that took its place because its output was refused."""
        job = self
        while True:
            result = await job._once_ended(reader_of(job))
            if (source := await job._source.successor_of(result.outcome)) is None:
                break
            job = AsyncJob(source, self._inbox)
        if check and result.outcome.state != "succeeded":
            raise error_of(result.outcome)
        return result

    async def _once_ended(self, read: Callable[[], Awaitable[AnyResult | None]]) -> AnyResult:
        feed = self._source.feed
        box = self._take_first_box() or self._open_box(behind=all(other.nudged for other in feed.boxes), max_chunks=1)
        try:
            while True:
                await self._wait_for_end(box)
                if (result := await read()) is not None:
                    break
                # Redis reported the end and then lost it.
                feed.ended = False
                box.nudge()
        finally:
            self._inbox.close_box(feed, box)
        if isinstance(result, Result) or result.is_fetched:
            self._source.forget_submission()
        return result

    async def ended_result(self) -> Result:
        """Return the result of a job that has ended, as its tenant's completions say. It may have failed.

        If its output was refused, and it is tried again, this waits for the result of its last attempt.
        """
        if (result := await self._source.result()) is None:
            return await self.result(check=False)  # Redis reported the end and then lost it.
        self._source.feed.ended = True
        if box := self._take_first_box():
            self._inbox.close_box(self._source.feed, box)
        self._source.forget_submission()
        if self._accepts is None and result.outcome.code != OUTPUT_REJECTED:
            return result
        return await self._accepted(check=False)

    async def renew(self) -> None:
        """Submit a job again that Redis has lost. Raises NotFoundError unless this client has its request."""
        await self._source.attach()

    async def waiting(self) -> AsyncGenerator[WaitUpdate, None]:
        """Yield the job's position in the queue and the progress of its prompt, until its first chunk or its end.

        Positions are estimates, and come only when they have changed. Progress comes only for a job that was submitted
        with `return_progress`. Closing the client ends the updates. Raises UnavailableError if it is closed before.
        """
        with self._source.watched() as watcher:
            async for update in watcher.updates():
                yield update

    async def status(self) -> JobStatus:
        """Return the job's state, for people."""
        return await self._source.status()

    async def ack(self) -> bool:
        """Free the job's result, which the caller has stored. Return whether this call has freed it.

        Afterwards `result` raises NotFoundError (`result_expired`).
        """
        return await self._source.ack()

    async def cancel(self) -> str:
        """Cancel the job. Return `cancelled`, `cancelling` (it ends within a step), or its earlier terminal state."""
        return await self._source.cancel()

    async def detach(self) -> None:
        """Stop reading this job here, unless another stream of this process reads it.

        A job that is not `background` is then canceled if it has no other reader.
        """
        if box := self._take_first_box():
            self._inbox.close_box(self._source.feed, box)
        if not self._source.feed.boxes:
            await self._inbox.detach(self.id)

    @contextmanager
    def present(self) -> Iterator[None]:
        """Count as a reader of the job in the block, without reading it."""
        with self._closing(self._open_box(behind=False, max_chunks=1)):
            yield

    def _box_to_read(self) -> AbstractContextManager[Mailbox]:
        return self._closing(self._take_first_box() or self._open_box(behind=True))

    @contextmanager
    def _closing(self, box: Mailbox) -> Iterator[Mailbox]:
        try:
            yield box
        finally:
            self._inbox.close_box(self._source.feed, box)

    def _take_first_box(self) -> Mailbox | None:
        box, self._first_box = self._first_box, None
        return box

    def _open_box(self, *, behind: bool, max_chunks: int | None = None) -> Mailbox:
        """Open a new mailbox. With `behind`, its reader may have missed chunks, so it first asks for the state."""
        box = self._inbox.open_box(self._source.feed, max_chunks, is_held=self._source.hold is not None)
        if behind:
            box.nudge()
        return box

    async def _wait_for_end(self, box: Mailbox) -> None:
        while not self._source.feed.ended:
            await box.wait(self._source.feed.poll_s)
            box.take_all()
            if box.take_nudge():
                await self._source.attach()


def checked_by(job: AsyncJob, check: OwnCheck) -> AsyncJob:
    """Return the job, whose result must pass a check of this process."""
    job._accepts = check
    return job
