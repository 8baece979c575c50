"""One job as its readers reach it, through thick and thin."""

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
    """What was submitted, kept so that it can be submitted again."""

    job: Job
    cost: int
    channel: bool
    terms: Terms = UNLIMITED


async def submit(courier: RetryingBroker, inbox: str, submission: Submission) -> Submitted:
    """Submits a job, repeatedly while Redis is away; raises what the broker raises."""
    return await courier.ask(lambda broker: _submit(broker, inbox, submission))


async def _submit(broker: ProducerBroker, inbox: str, submission: Submission) -> Submitted:
    job, terms = submission.job, submission.terms
    return await broker.submit(job, cost=submission.cost, inbox=inbox, channel=submission.channel, terms=terms)


class JobSource:
    """A job's standing, log and result. A job of ours that Redis lost is submitted again: same id, same bytes."""

    def __init__(
        self,
        courier: RetryingBroker,
        inbox: ClientInbox,
        job_id: str,
        tenant: str,
        submission: Submission | None = None,
    ) -> None:
        self._courier = courier
        self._inbox = inbox
        self.job_id = job_id
        self.tenant = tenant
        self._submission = submission
        self.feed = inbox.feed(job_id)

    async def attach(self) -> Attached:
        """Registers this process as a reader (again) and tells where the job stands."""
        await self._inbox.settled(self.job_id)
        inbox = self._inbox.name
        try:
            standing = await self._courier.ask(lambda broker: broker.attach(self.job_id, self.tenant, inbox=inbox))
        except NotFoundError:
            if self._submission is None or self.feed.ended:
                raise
            self._inbox.stats.resubmits += 1
            # It was accepted once: no limit may refuse it now.
            again = await self._submit_again(replace(self._submission, terms=self._submission.terms.without_limits()))
            standing = Attached(again.state, again.num_chunks, again.pushed)
        self.feed.note(standing)
        return standing

    async def _submit_again(self, submission: Submission) -> Submitted:
        async def attempt(broker: ProducerBroker) -> Submitted:
            try:
                return await _submit(broker, self._inbox.name, submission)
            except NotFoundError as error:
                # Redis lost the pool as well; its nodes come back to announce it.
                raise UnavailableError(error.message, code=error.code) from error

        return await self._courier.ask(attempt)

    async def hear_out(self) -> None:
        """Returns when all that was published before the call has come to the mailboxes."""
        with suppress(UnavailableError):
            await self._inbox.hear_out()

    async def log(self, start: int, count: int) -> list[Chunk]:
        """A page of the job's log."""
        self._inbox.stats.log_reads += 1
        chunks = await self._courier.ask(lambda broker: broker.log(self.job_id, start, count))
        crash_points.point("after", "log")
        return chunks

    async def result(self) -> Result | None:
        """The job's terminal record, None while it has none."""
        return await self._courier.ask(lambda broker: broker.result(self.job_id, self.tenant))

    async def packed_result(self) -> PackedResult | None:
        """The same, decoded in parts."""
        return await self._courier.ask(lambda broker: broker.packed_result(self.job_id, self.tenant))

    async def status(self) -> JobStatus:
        """Where the job stands, for people."""
        return await self._courier.ask(lambda broker: broker.status(self.job_id, self.tenant))

    async def cancel(self) -> str:
        """Cancels the job; answers its state."""
        return await self._courier.ask(lambda broker: broker.cancel(self.job_id, self.tenant))
