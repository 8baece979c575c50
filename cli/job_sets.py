"""`penstock jobs progress` and `penstock jobs export`: how far a set of jobs is, and its results in a file."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import RedisUrl
from penstock.cli.output import AsJson, print_object, write_line
from penstock.runtime.settings import redis_url_of

if TYPE_CHECKING:
    from penstock.contract.job_counts import JobCounts

DEFAULT_EVERY_S = 2.0
MIN_EVERY_S = 0.1

SetTag = Annotated[str | None, typer.Option(help="Tag of the jobs. Default: all jobs of the tenant.")]
SetPool = Annotated[str | None, typer.Option(help="Pool of the jobs. Default: all pools.")]
SetTenant = Annotated[str, typer.Option(help="Tenant of the jobs.")]


def progress(
    tag: SetTag = None,
    batch: Annotated[str | None, typer.Option(help="Id of a batch or flow, instead of a tag.")] = None,
    bulk: Annotated[str | None, typer.Option(help="Id of a bulk action, instead of a tag.")] = None,
    pool: SetPool = None,
    tenant: SetTenant = "default",
    once: Annotated[bool, typer.Option("--once", help="Print the present counts, and do not wait.")] = False,
    every: Annotated[
        float, typer.Option(min=MIN_EVERY_S, metavar="SECONDS", help="Time between two looks.")
    ] = DEFAULT_EVERY_S,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print how many jobs of a set have ended, how fast they do, and when the last one will, until none is open.

    With --json it prints the last counts, by state and class. A tag counts its jobs as long as one of them is kept.

    Examples:
        penstock jobs progress --tag run:7
        penstock jobs progress --tag run:7 --once --json
        penstock jobs progress --batch BATCH_ID
        penstock jobs progress --bulk BULK_ID
    """

    async def follow() -> JobCounts:
        from penstock.producer.client import AsyncClient

        async with AsyncClient(redis_url_of(redis_url), tenant=tenant) as client:
            if once:
                counts = await client.sets.counts(tag=tag, batch=batch, bulk=bulk, pool=pool)
                if not as_json:
                    write_line(line_of(counts))
                return counts
            said = ""
            async for counts in client.sets.progress(tag=tag, batch=batch, bulk=bulk, pool=pool, every_s=every):
                if not as_json and (line := line_of(counts)) != said:
                    said = line
                    write_line(line)
            return counts

    counts = asyncio.run(follow())
    if as_json:
        print_object(counts.as_object(), as_json=True)


def line_of(counts: JobCounts) -> str:
    """Return a line about the jobs of a set."""
    parts = [f"{counts.num_ended:,} of {counts.total:,} ended"]
    parts += [f"{count:,} {state}" for state, count in counts.states.items() if state != "succeeded"]
    if counts.rate_per_s is not None:
        parts.append(f"{counts.rate_per_s:,.1f} a second")
    if (end_ms := counts.expected_end_ms) is not None:
        parts.append(f"expected end {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(end_ms / 1000))}")
    return ", ".join(parts)


def export(
    output: Annotated[str, typer.Argument(help="JSONL file for the results, one line a job; or a file .parquet.")],
    tag: Annotated[str, typer.Option(help="Tag of the jobs.")],
    pool: SetPool = None,
    tenant: SetTenant = "default",
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Write what has ended, and do not wait for the other jobs.")
    ] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Write the results of a tag's jobs to OUTPUT while they end, and print how many.

    A killed export goes on where it was: run the same command again. OUTPUT.cursor says how far the file is whole. A
    file .parquet is made at the end of OUTPUT.jsonl; it needs pyarrow.
    Rows of batches are not among the jobs: a batch has files of its own.

    Examples:
        penstock jobs export results.jsonl --tag run:7
    """

    async def work() -> None:
        from penstock.producer.client import AsyncClient

        async with AsyncClient(redis_url_of(redis_url), tenant=tenant) as client:
            report = await client.sets.export(output, tag=tag, pool=pool, follow=not no_wait)
            write_line(f"{report.num_jobs:,} jobs in {output}, {report.num_new:,} of them new")

    asyncio.run(work())
