"""A reader's access to one job in Redis, across outages and losses."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from penstock.contract.errors import NotFoundError, UnavailableError
from penstock.contract.job import Chunk, Job, Result
from penstock.contract.terms import UNLIMITED, Terms
from penstock.producer.client.inbox import ClientInbox
from penstock.producer.client.retrying_broker import RetryingBroker
from penstock.queue.broker.producer import Attached, JobStatus, ProducerBroker, Submitted
from penstock.queue.packed_result import PackedResult
from penstock.runtime import crash_points


@dataclass(frozen=True, slots=True)
class Submission:
    """A submitted job with its options, kept so that it can be submitted again."""

    job: Job
    cost: int
    channel: bool
    terms: Terms = UNLIMITED


async def submit(broker: RetryingBroker, inbox: str, submission: Submission) -> Submitted:
    """Submit a job, with retries while Redis is away. Raises what the broker raises."""
    return await broker.call(lambda producer: _submit(producer, inbox, submission))


async def _submit(broker: ProducerBroker, inbox: str, submission: Submission) -> Submitted:
    job, terms = submission.job, submission.terms
    return await broker.submit(job, cost=submission.cost, inbox=inbox, channel=submission.channel, terms=terms)


class JobSource:
    """The state, log and result of one job.

    If this process submitted the job and Redis lost it, it is submitted again: same id, same bytes.
    """

    def __init__(
        self, broker: RetryingBroker, inbox: ClientInbox, job_id: str, tenant: str, submission: Submission | None = None
    ) -> None:
        self._broker = broker
        self._inbox = inbox
        self.job_id = job_id
        self.tenant = tenant
        self._submission = submission
        self.feed = inbox.feed(job_id)

    async def attach(self) -> Attached:
        """Register this process as a reader, perhaps again, and return the job's state."""
        await self._inbox.wait_for_detach(self.job_id)
        inbox = self._inbox.name
        try:
            attached = await self._broker.call(lambda producer: producer.attach(self.job_id, self.tenant, inbox=inbox))
        except NotFoundError:
            if self._submission is None or self.feed.ended:
                raise
            self._inbox.stats.resubmits += 1
            # The job was accepted once, so no limit may refuse it now.
            again = await self._submit_again(replace(self._submission, terms=self._submission.terms.without_limits()))
            attached = Attached(again.state, again.num_chunks, again.pushed)
        self.feed.note(attached)
        return attached

    async def _submit_again(self, submission: Submission) -> Submitted:
        async def attempt(broker: ProducerBroker) -> Submitted:
            try:
                return await _submit(broker, self._inbox.name, submission)
            except NotFoundError as error:
                # Redis lost the pool too; the nodes will announce it again.
                raise UnavailableError(error.message, code=error.code) from error

        return await self._broker.call(attempt)

    async def hear_out(self) -> None:
        """Wait until everything published before the call is in the mailboxes."""
        with suppress(UnavailableError):
            await self._inbox.hear_out()

    async def log(self, start: int, count: int) -> list[Chunk]:
        """Return up to `count` chunks of the job's log, from index `start`."""
        self._inbox.stats.log_reads += 1
        chunks = await self._broker.call(lambda producer: producer.log(self.job_id, start, count))
        crash_points.point("after", "log")
        return chunks

    async def result(self) -> Result | None:
        """Return the job's result, or None before its end."""
        return await self._broker.call(lambda producer: producer.result(self.job_id, self.tenant))

    async def packed_result(self) -> PackedResult | None:
        """Return the job's result, with parts that are decoded on access, or None before its end."""
        return await self._broker.call(lambda producer: producer.packed_result(self.job_id, self.tenant))

    async def status(self) -> JobStatus:
        """Return the job's state, for people."""
        return await self._broker.call(lambda producer: producer.status(self.job_id, self.tenant))

    async def cancel(self) -> str:
        """Cancel the job and return its state."""
        return await self._broker.call(lambda producer: producer.cancel(self.job_id, self.tenant))
