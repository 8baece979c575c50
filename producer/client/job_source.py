"""A reader's access to one job in Redis, across outages and losses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from penstock.contract.errors import NotFoundError, UnavailableError
from penstock.contract.job import pool_of
from penstock.contract.output import Chunk, Result
from penstock.producer.client.inbox import ClientInbox
from penstock.producer.client.waiting import QueueWatch, WaitWatcher
from penstock.queue.broker.producer import Attached, JobStatus, ProducerBroker, Submission
from penstock.queue.broker.retry import Retries
from penstock.queue.packed_result import Fetches, PackedResult
from penstock.runtime import crash_points


class JobSource:
    """The state, log and result of one job.

    If this process submitted the job and Redis lost it, it is submitted again: same id, same bytes.
    """

    def __init__(
        self,
        broker: ProducerBroker,
        retries: Retries,
        inbox: ClientInbox,
        queue_watch: QueueWatch,
        job_id: str,
        tenant: str,
        submission: Submission | None = None,
    ) -> None:
        self._broker = broker
        self._retries = retries
        self._inbox = inbox
        self._queue_watch = queue_watch
        self.job_id = job_id
        self.tenant = tenant
        self._submission = submission
        self.feed = inbox.feed(job_id)

    @property
    def is_background(self) -> bool | None:
        """Whether the job continues without a reader; None if another process submitted it, or its result was read."""
        return None if self._submission is None else self._submission.job.background

    def forget_submission(self) -> None:
        """Give back the memory of the prompt, once the result was read. The job is not submitted again after that."""
        self._submission = None

    async def attach(self) -> Attached:
        """Register this process as a reader, perhaps again, and return the job's state."""
        await self._inbox.wait_for_detach(self.job_id)
        inbox = self._inbox.name
        try:
            attached = await self._retries.call(lambda: self._broker.attach(self.job_id, self.tenant, inbox=inbox))
            if not self._inbox.listens_to(pool := pool_of(self.job_id)):
                # Only now, so that ids that name no job add no subscription. The answer above may already be old.
                await self._retries.call(lambda: self._inbox.listen_to(pool))
                attached = await self._retries.call(lambda: self._broker.attach(self.job_id, self.tenant, inbox=inbox))
        except NotFoundError:
            if self._submission is None or self.feed.ended:
                raise
            self._inbox.stats.resubmits += 1
            # The job was accepted once, so no limit may refuse it now.
            again = replace(self._submission, terms=self._submission.terms.without_limits())
            attached = await self._retries.call(lambda: self._broker.submit(again, inbox))
        self.feed.note(attached)
        return attached

    async def receive_published(self) -> None:
        """Wait until everything published before the call is in the mailboxes."""
        with suppress(UnavailableError):
            await self._inbox.receive_published()

    async def log(self, start: int, count: int) -> list[Chunk]:
        """Return up to `count` chunks of the job's log, from index `start`."""
        self._inbox.stats.log_reads += 1
        chunks = await self._retries.call(lambda: self._broker.log(self.job_id, start, count))
        crash_points.point("after", "log")
        return chunks

    async def result(self) -> Result | None:
        """Return the job's result, or None before its end."""
        return await self._retries.call(lambda: self._broker.result(self.job_id, self.tenant))

    async def packed_result(self, fetches: Fetches | None = None) -> PackedResult | None:
        """Return the job's result, with parts that are decoded on access, or None before its end."""
        return await self._retries.call(lambda: self._broker.packed_result(self.job_id, self.tenant, fetches))

    async def status(self) -> JobStatus:
        """Return the job's state, for people."""
        status = await self._retries.call(lambda: self._broker.status(self.job_id, self.tenant))
        if status.state != "queued":
            return status
        return replace(status, queue_position=await self._queue_watch.position_of(self.job_id))

    @contextmanager
    def watched(self) -> Iterator[WaitWatcher]:
        """Open a watcher of the job's wait."""
        watcher = WaitWatcher()
        self.feed.watchers.append(watcher)
        self._queue_watch.add(self.job_id, watcher)
        try:
            yield watcher
        finally:
            self._queue_watch.remove(watcher)
            self.feed.watchers.remove(watcher)

    async def cancel(self) -> str:
        """Cancel the job and return its state."""
        return await self._retries.call(lambda: self._broker.cancel(self.job_id, self.tenant))
