"""The last step of a submission: an admitted job goes to Redis, and its caller gets a handle that misses no chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from penstock.contract.durability import Durability
from penstock.producer.client.job import AsyncJob, JobSource
from penstock.producer.client.servers import QueueServer
from penstock.queue.broker.producer import Submission


class SourceOf(Protocol):
    """Returns where the log of a job is read."""

    def __call__(
        self, job_id: str, tenant: str | None, durability: Durability | None, submission: Submission | None = None, /
    ) -> JobSource: ...


async def enqueued(server: QueueServer, submission: Submission, source_of: SourceOf) -> AsyncJob:
    """Enqueue an admitted job on its server, and return its handle."""
    job, inbox = submission.job, server.inbox
    feed = inbox.feed(job.id)
    if (reads := server.reads(job.token_durability)) is not None:
        await reads.check()
    # Chunks may arrive before the answer, so the first reader's mailbox opens before the call.
    box = inbox.open_box(feed, is_held=reads is not None)
    try:
        submitted = await server.broker.submit(submission, inbox.name)
        server.renewal.recent.accepted(submission, submitted, inbox.feed)
    except BaseException:
        inbox.close_box(feed, box)
        raise
    if submitted.job_id != job.id:
        inbox.close_box(feed, box)
        known = replace(submission, job=job.model_copy(update={"id": submitted.job_id}))
        return AsyncJob(source_of(submitted.job_id, None, job.token_durability, known), inbox)
    if submitted.existed or not submitted.pushed:
        box.nudge()
    return AsyncJob(source_of(job.id, None, job.token_durability, submission), inbox, first_box=box)
