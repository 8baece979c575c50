"""What a client gives Redis again that a fail-over lost: accepted jobs, cancellations and deletions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from redis.asyncio import Redis

from penstock.contract.errors import PenstockError, UnavailableError
from penstock.contract.job import MEMORY
from penstock.producer.client.inbox import ClientInbox
from penstock.producer.client.job import RecentSubmissions
from penstock.producer.client.settings import ClientSettings
from penstock.queue.broker.history import HistoryWatch, RecentCalls
from penstock.queue.broker.jobs import KnownJobs
from penstock.queue.broker.producer import ProducerBroker, Submission
from penstock.runtime.event_loop import cancel_until_done

_LOG = logging.getLogger(__package__)
_JOBS_AT_ONCE = 64
"""Lost jobs that are submitted together."""


class Renewal:
    """Notices that Redis has a new history, and gives it what it lacks and this client still has."""

    def __init__(
        self,
        redis: Redis,
        broker: ProducerBroker,
        known_jobs: KnownJobs,
        inbox: ClientInbox,
        kept: Callable[[], list[Submission]],
        calls: RecentCalls,
        settings: ClientSettings,
    ) -> None:
        """`kept` returns the requests of handles on open jobs. `calls`: what is repeated after the jobs."""
        self._broker = broker
        self._known_jobs = known_jobs
        self._inbox = inbox
        self._kept = kept
        self._calls = calls
        self.recent = RecentSubmissions(keep_s=settings.failover_keep_s, max_bytes=settings.failover_keep_mib << 20)
        self._watch = HistoryWatch(redis, self._compare, name=inbox.name)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look at the history of Redis."""
        self._task = asyncio.create_task(self._watch.run(), name=f"penstock history {self._inbox.name}")

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            await cancel_until_done((self._task,))

    async def _compare(self) -> None:
        """Submit lost jobs again, repeat what else is recent, and let all readers compare. Raises UnavailableError."""
        self._inbox.stats.histories += 1
        feeds = self._inbox
        kept = [one for one in self._kept() if not ((feed := feeds.known(one.job.id)) and feed.ended)]
        submissions = {one.job.id: one for one in (*kept, *self.recent.open())}
        unknown = await self._known_jobs.unknown(list(submissions))
        for start in range(0, len(unknown), _JOBS_AT_ONCE):
            await self._submit_again([submissions[job_id] for job_id in unknown[start : start + _JOBS_AT_ONCE]])
        num_repeated = await self._calls.repeat()
        self._inbox.nudge_all()
        if unknown or num_repeated:
            facts = {"num_jobs": len(unknown), "num_calls": num_repeated}
            _LOG.warning("redis had lost jobs or calls of this process; they are repeated", extra=facts)

    async def _submit_again(self, submissions: Sequence[Submission]) -> None:
        answers = await asyncio.gather(*map(self._submit, submissions), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, UnavailableError) or not isinstance(answer, (PenstockError, type(None))):
                raise answer

    async def _submit(self, submission: Submission) -> None:
        """Submit one job under its old id. If its idempotency key names another job by now, that one stands."""
        feed = self._inbox.known(submission.job.id)
        inbox = self._inbox.name if feed is not None and feed.boxes else ""
        self._inbox.stats.resubmits += 1
        # It was accepted once, so no limit may refuse it now. Its caller has the answer, so it waits for no disk.
        again = replace(submission, terms=submission.terms.without_limits(), durability=MEMORY)
        try:
            await self._broker.submit(again, inbox)
        except UnavailableError:
            raise
        except PenstockError as error:
            facts = {"job_id": submission.job.id, "reason": error.message}
            _LOG.warning("a lost job cannot be submitted again", extra=facts)
            raise
