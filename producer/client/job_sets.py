"""Sets of jobs, those of a tenant, of a tag or of a batch: counts, progress, and the results of a tag in a file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar, Unpack

from penstock.contract.errors import RequestError
from penstock.contract.job_actions import JobFilter, checked_tag
from penstock.contract.job_counts import CountsOfPools, JobCounts, counts_of_batch, counts_of_bulk
from penstock.contract.output import Result
from penstock.producer.client import parquet
from penstock.producer.client.completions import CompletionFeed
from penstock.producer.client.control import JobControl
from penstock.producer.client.exports import ExportReport, SetExport
from penstock.producer.client.servers import QueueServers
from penstock.queue.broker.jobs import JobStatus
from penstock.queue.files.batch_records import BatchRecords

T = TypeVar("T")
LOOK_S = 1.0
"""Seconds between two looks at the progress of a set."""


class _Reads(Protocol):
    """What a set reads of its jobs."""

    async def status(self, job_id: str, *, tenant: str | None = None) -> JobStatus: ...

    async def result(self, job_id: str, *, check: bool, tenant: str | None = None) -> Result: ...


class SetOptions(TypedDict, total=False):
    """A set of jobs: those of a tag or a bulk action, the rows of a batch or flow, or all jobs of the tenant; of all
    pools or of one.
    """

    tag: str | None
    batch: str | None
    bulk: str | None
    pool: str | None
    tenant: str | None


class JobSets:
    """A client's access to sets of jobs, as `AsyncClient.sets`. Raises UnavailableError if a Redis is unreachable."""

    def __init__(
        self,
        servers: QueueServers,
        feed: CompletionFeed,
        batches: BatchRecords,
        control: JobControl,
        jobs: _Reads,
        tenant: str,
    ) -> None:
        self._servers = servers
        self._feed = feed
        self._batches = batches
        self._control = control
        self._jobs = jobs
        self._tenant = tenant

    async def counts(self, **jobs: Unpack[SetOptions]) -> JobCounts:
        """Return how many jobs of a set are in which state and class, and how fast those of a tag or batch end.

        Raises RequestError for a wrong tag or pool, and NotFoundError for an unknown batch or bulk action.
        """
        owner = jobs.get("tenant") or self._tenant
        given = [name for name, value in jobs.items() if value is not None and name != "tenant"]
        for name in ("batch", "bulk"):
            if name in given and given != [name]:
                raise RequestError(f"{name}: give either batch, or bulk, or tag and pool", param=name)
        if (bulk_id := jobs.get("bulk")) is not None:
            return counts_of_bulk(await self._control.report(bulk_id, tenant=owner))
        if (batch_id := jobs.get("batch")) is not None:
            found = await self._batches.find(batch_id, owner)
            rows = found.num_rows, found.num_completed, found.num_failed
            rate = (found.is_open and found.rows_per_s) or None
            return counts_of_batch(batch_id, owner, rows, rate, now_ms=round(1000 * self._batches.now_s()))
        wanted = JobFilter(tenant=owner, pool=jobs.get("pool"), tag=checked_tag(jobs.get("tag")))
        sums = CountsOfPools()
        for server in self._servers.require_all() if self._servers.is_split else self._servers.all:
            for pool in await server.steering.pools_of(wanted):
                if self._servers.of(pool) is server:
                    sums.add(await server.lists.counted(pool, owner, wanted.tag), has_tag=wanted.tag is not None)
        return sums.counts(owner, wanted.tag)

    async def progress(self, *, every_s: float = LOOK_S, **jobs: Unpack[SetOptions]) -> AsyncGenerator[JobCounts, None]:
        """Yield the counts of a set every `every_s` seconds, until no job of it is open; of a batch, until its end.

        Jobs that are submitted to the set before that count too.
        """
        if not every_s > 0:
            raise RequestError("every_s: must be above 0 seconds", param="every_s")
        while True:
            counts = await self.counts(**jobs)
            yield counts
            if not (counts.num_open or await self._is_open_batch(counts)):
                return
            await asyncio.sleep(every_s)

    async def _is_open_batch(self, counts: JobCounts) -> bool:
        """Return whether these are the counts of a batch that has not ended.

        Its rows are counted only once all of them were checked, and its files are finished after its last row.
        """
        batch_id = counts.batch_id
        return batch_id is not None and (await self._batches.find(batch_id, counts.tenant)).is_open

    async def export(
        self, path: str | Path, *, tag: str, pool: str | None = None, tenant: str | None = None, follow: bool = True
    ) -> ExportReport:
        """Write the results of a tag's jobs to a JSONL file while they end, one line a job, and return how many.

        With `follow`, it waits until no job of the tag is open. A later call with the same file goes on where this one
        was killed: PATH.cursor says where. For a path that ends in `.parquet`, the lines come to PATH.jsonl, and the
        Parquet file is made of them at the end. Raises RequestError for a file of another set, and without pyarrow.
        """
        owner, checked = tenant or self._tenant, checked_tag(tag)
        if checked is None:
            raise RequestError("tag: an export needs a tag", param="tag")

        async def is_over() -> bool:
            return not follow or not (await self.counts(tag=checked, pool=pool, tenant=owner)).num_open

        target = Path(path)
        is_table = target.suffix == parquet.SUFFIX
        if is_table:
            parquet.check_pyarrow()
        lines = target.with_name(f"{target.name}.jsonl") if is_table else target
        export = SetExport(lines, owner, checked, pool)
        report = await export.run(self._feed, self._jobs.status, self._jobs.result, is_over)
        if is_table:
            await asyncio.to_thread(parquet.write_parquet, lines, target)
        return report


class SyncJobSets:
    """Sets of jobs for synchronous callers, as `Client.sets`; see `JobSets`, whose methods it has."""

    def __init__(
        self,
        sets: JobSets,
        call: Callable[..., Any],
        pulled: Callable[[AsyncGenerator[JobCounts, None]], Generator[JobCounts, None, None]],
    ) -> None:
        self._sets = sets
        self._call = call
        self._pulled = pulled

    def counts(self, **jobs: Unpack[SetOptions]) -> JobCounts:
        """Return how many jobs of a set are in which state and class; see `JobSets.counts`."""
        found: JobCounts = self._call(self._sets.counts(**jobs))
        return found

    def progress(self, *, every_s: float = LOOK_S, **jobs: Unpack[SetOptions]) -> Generator[JobCounts, None, None]:
        """Yield the counts of a set until no job of it is open; see `JobSets.progress`."""
        return self._pulled(self._sets.progress(every_s=every_s, **jobs))

    def export(
        self, path: str | Path, *, tag: str, pool: str | None = None, tenant: str | None = None, follow: bool = True
    ) -> ExportReport:
        """Write the results of a tag's jobs to a JSONL file while they end; see `JobSets.export`."""
        found: ExportReport = self._call(self._sets.export(path, tag=tag, pool=pool, tenant=tenant, follow=follow))
        return found
