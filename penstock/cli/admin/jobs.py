"""`penstock jobs`: list, show, cancel and follow jobs of all tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from penstock.cli.command_line.commands import App
from penstock.cli.options import RedisUrl
from penstock.cli.output import AsJson, JsonArray, print_object, time_in_words, write_text
from penstock.runtime.settings import redis_url_of

if TYPE_CHECKING:
    from penstock.contract.output import Result
    from penstock.producer.client import AsyncClient
    from penstock.queue.broker.job_records import JobStatus

T = TypeVar("T")
JobId = Annotated[str, typer.Argument(help="Job id as printed by `list`.")]
StateName = Literal["queued", "running", "done", "failed", "cancelled", "expired"]

app = App()


@app.callback()
def jobs() -> None:
    """List, show, cancel or follow jobs. An ended job is kept for 24 hours, a dead letter for 7 days."""


@app.command("list")
def list_jobs(
    pool: Annotated[str | None, typer.Option(help="Pool to list. Default: all pools.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant to list. Default: all tenants.")] = None,
    state: Annotated[StateName | None, typer.Option(help="State of the jobs. Default: all states.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most jobs, newest first.")] = 20,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print one line per job, newest first: id, state, class, tenant, time of queueing, duration and tokens."""

    async def find(show: Callable[[JobStatus], None]) -> None:
        from penstock.queue.broker.connection import connect
        from penstock.queue.broker.job_lists import MAX_PAGE_JOBS, JobLists

        async with connect(redis_url_of(redis_url)) as redis:
            num_left, after = limit, None
            while num_left:
                page = await JobLists(redis).page(
                    tenant, pool=pool, state=state, after=after, limit=min(num_left, MAX_PAGE_JOBS)
                )
                for status in page.jobs:
                    show(status)
                num_left, after = num_left - len(page.jobs), page.next_after
                if after is None:
                    return

    if as_json:
        from penstock.producer.client.job_objects import job_object

        with JsonArray() as array:
            asyncio.run(find(lambda status: array.add(job_object(status))))
    else:
        asyncio.run(find(lambda status: print(line_of(status))))


@app.command()
def show(
    job_id: JobId,
    result: Annotated[bool, typer.Option("--result", help="Include the texts of an ended job.")] = False,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print a job's state and ledger.

    Examples:
        penstock jobs show JOB_ID
        penstock jobs show JOB_ID --result --json
    """

    async def find(client: AsyncClient, tenant: str) -> dict[str, Any]:
        from penstock.producer.client.job_objects import job_object, queue_members

        status = await client.status(job_id, tenant=tenant)
        shown = job_object(status)
        if status.state == "queued":
            shown |= queue_members(status)
        if result and status.outcome is not None:
            shown["result"] = _result_object(await client.result(job_id, tenant=tenant, check=False))
        return shown

    print_object(_run(redis_url, job_id, find), as_json=as_json)


@app.command()
def cancel(
    job_ids: Annotated[list[str], typer.Argument(help="Job ids as printed by `list`.")], redis_url: RedisUrl = None
) -> None:
    """Cancel jobs. Prints each id and state; a running job ends within a step.

    Examples:
        penstock jobs cancel JOB_ID
    """
    for job_id in job_ids:
        print(job_id, _run(redis_url, job_id, partial(_cancel, job_id)))


@app.command()
def tail(
    job_id: JobId,
    after: Annotated[int, typer.Option(min=-1, help="Begin after this chunk. Default: with the first chunk.")] = -1,
    choice: Annotated[int, typer.Option(min=0, help="The choice whose text is printed.")] = 0,
    redis_url: RedisUrl = None,
) -> None:
    """Print a job's text while it is generated, until the job ends. Ctrl-C does not end a background job.

    Examples:
        penstock jobs tail JOB_ID
    """

    async def follow(client: AsyncClient, tenant: str) -> None:
        job = await client.attach(job_id, after=after, tenant=tenant)
        try:
            async for chunk in job.stream():
                if chunk.choice == choice:
                    write_text(chunk.text)
        finally:
            print()

    _run(redis_url, job_id, follow)


async def _cancel(job_id: str, client: AsyncClient, tenant: str) -> str:
    return await client.cancel(job_id, tenant=tenant)


def line_of(status: JobStatus) -> str:
    """Return the line of a job in `penstock jobs list`."""
    ledger = status.ledger
    parts = [status.job_id, status.state, status.priority.label, status.tenant, time_in_words(ledger.queued_ms)]
    if ledger.finished_ms:
        parts.append(f"{(ledger.finished_ms - ledger.queued_ms) / 1000:.2f} s")
    if ledger.usage is not None:
        parts.append(f"{ledger.usage.prompt_tokens}+{ledger.usage.completion_tokens} tokens")
    if ledger.num_past_leases:
        parts.append(f"{ledger.num_past_leases} past leases")
    return "  ".join(parts)


def _result_object(result: Result) -> dict[str, Any]:
    choices = [
        {"index": choice.index, "text": choice.text, "finish_reason": choice.finish_reason} for choice in result.choices
    ]
    return {"choices": choices}


def _run(redis_url: str | None, job_id: str, work: Callable[[AsyncClient, str], Awaitable[T]]) -> T:
    """Run `work` with a client and the job's tenant."""

    async def run() -> T:
        from penstock.producer.client import AsyncClient
        from penstock.queue.broker.connection import connect
        from penstock.queue.broker.job_lists import JobLists

        url = redis_url_of(redis_url)
        async with connect(url) as redis:
            tenant = await JobLists(redis).owner(job_id)
        async with AsyncClient(url) as client:
            return await work(client, tenant)

    return asyncio.run(run())
