"""`penstock jobs`: list, show, change, cancel, retry and follow jobs of all tenants."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from penstock.cli.command_line import App
from penstock.cli.job_sets import export, progress
from penstock.cli.job_table import JobTable
from penstock.cli.options import SPAN, TIME_HELP, RedisUrl, seconds_of_text, unix_s_of
from penstock.cli.output import AsJson, JsonArray, confirm, print_object, say_empty, write_line, write_text
from penstock.contract.errors import NotFoundError, RequestError, UnavailableError
from penstock.runtime.settings import pool_urls, redis_url_of

if TYPE_CHECKING:
    from penstock.contract.job_actions import JobFilter
    from penstock.contract.output import Result
    from penstock.producer.client import AsyncClient
    from penstock.queue.broker.job_lists import JobPage
    from penstock.queue.broker.jobs import JobStatus


T = TypeVar("T")
JobId = Annotated[str, typer.Argument(help="Job id as printed by `list --wide`, with or without its pool.")]
JobIds = Annotated[list[str], typer.Argument(help="Job ids as printed by `list --wide`.")]
PriorityName = Literal["interactive", "standard", "batch"]
ActionName = Literal["cancel", "retry", "reschedule", "change_class"]

app = App()

ListedClass = Annotated[PriorityName | None, typer.Option(help="Class of the jobs. Default: all classes.")]
ListedKind = Annotated[
    bool | None, typer.Option("--background/--foreground", help="Only background or foreground jobs.")
]
ListedTag = Annotated[str | None, typer.Option(help="Tag of the jobs.")]
Since = Annotated[str | None, typer.Option(help=f"Only jobs submitted from this time on. {TIME_HELP}")]
CustomId = Annotated[str | None, typer.Option(help="custom_id of the jobs.")]
Members = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=TEXT",
        help="Member of the jobs' metadata. Repeat it for several. It also needs --tag, --custom-id or --since.",
    ),
]
Until = Annotated[str | None, typer.Option(help=f"Only jobs submitted before this time. {TIME_HELP}")]


def _filter_of(
    now_s: float, tenant: str | None, state: list[str] | None, since: str | None, until: str | None, **given: Any
) -> JobFilter:
    """Return the filter that the options of a command name. `now_s`: from which ages count. Raises RequestError."""
    from penstock.contract.job_actions import JobFilter

    given["metadata"] = _members_of(given.get("metadata"))
    begin_s, end_s = unix_s_of(since, "since", now_s), unix_s_of(until, "until", now_s)
    times = {"submitted_after": begin_s, "submitted_before": end_s}
    return JobFilter.of({**given, "state": state or None, **times}, tenant=tenant)


def _members_of(given: list[str] | None) -> dict[str, str] | None:
    """Return the members that options name as `NAME=TEXT`. Raises RequestError."""
    for one in given or ():
        if "=" not in one:
            raise RequestError(f"metadata: must be NAME=TEXT, not {one[:64]!r}", param="metadata")
    return {name: text for name, _, text in (one.partition("=") for one in given or ())} or None


def _states(incomplete: str) -> list[str]:
    """Return the states that a shell completes."""
    from penstock.contract.output import STATES

    return [state for state in STATES if state.startswith(incomplete)]


@app.callback()
def jobs() -> None:
    """List, show, steer or follow jobs. An ended job is kept for 24 hours, a dead letter for 7 days."""


@app.command("list")
def list_jobs(
    pool: Annotated[str | None, typer.Option(help="Pool to list. Default: all pools.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant to list. Default: all tenants.")] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATE",
            help="State of the jobs, such as failed. Repeat it for several. Default: all states.",
            autocompletion=_states,
        ),
    ] = None,
    priority: ListedClass = None,
    background: ListedKind = None,
    tag: ListedTag = None,
    custom_id: CustomId = None,
    metadata: Members = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most jobs, newest first.")] = 20,
    wide: Annotated[bool, typer.Option("--wide", help="Also print the class, tenant and id of each job.")] = False,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print a table of jobs, newest first. IN and OUT are tokens, AGE is the time since a job was accepted.

    `show` tells the rest of a job. It takes an id, which `--wide` prints.
    """

    async def find(begin: Callable[[int], Callable[[JobStatus], None]]) -> None:
        """`begin` gets the time of Redis, in ms, and returns what shows a job."""
        from penstock.queue.broker.job_lists import MAX_PAGE_JOBS

        given: dict[str, Any] = {"tenant": tenant, "state": state, "since": since, "until": until, "pool": pool}
        given |= {"priority": priority, "background": background, "tag": tag}
        given |= {"custom_id": custom_id, "metadata": metadata}
        _filter_of(time.time(), **given)  # A wrong option is refused before Redis is asked for its time.
        async with _pages(redis_url, pool) as (page_of, now_ms):
            wanted = _filter_of(now_ms / 1000, **given)
            num_left, after, show = limit, None, begin(now_ms)
            while num_left:
                page = await page_of(wanted, after=after, limit=min(num_left, MAX_PAGE_JOBS))
                for status in page.jobs:
                    show(status)
                num_left, after = num_left - len(page.jobs), page.next_after
                if after is None:
                    return

    if as_json:
        from penstock.producer.client.job_objects import job_object

        with JsonArray() as array:
            asyncio.run(find(lambda _: lambda status: array.add(job_object(status))))
    else:
        table = JobTable(is_wide=wide)
        asyncio.run(find(table.begin))
        if table.is_empty:
            say_empty("no jobs")


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

    async def find(client: AsyncClient, job_id: str, tenant: str) -> dict[str, Any]:
        from penstock.producer.client.job_objects import job_object, queue_members

        status = await client.status(job_id, tenant=tenant)
        shown = job_object(status)
        if status.state in ("scheduled", "queued"):
            shown |= queue_members(status)
        if result and status.outcome is not None:
            shown["result"] = _result_object(await client.result(job_id, tenant=tenant, check=False))
        return shown

    print_object(_run(redis_url, job_id, find), as_json=as_json)


def why(job_id: JobId, as_json: AsJson = False, redis_url: RedisUrl = None) -> None:
    """Say what a job waits for and what would help, or where its time went, node by node.

    Examples:
        penstock why JOB_ID
        penstock why JOB_ID --json
    """

    async def find(client: AsyncClient, job_id: str, tenant: str) -> dict[str, Any]:
        from penstock.producer.client.explanation import explain

        return await explain(client, job_id, tenant=tenant)

    told = _run(redis_url, job_id, find)
    if as_json:
        print_object(told, as_json=True)
        return
    write_line(f"{told['id']}: {told['state']}, {told['seconds']:.1f} s since it was accepted")
    if told["not_recorded"]:
        write_line(f"{'':>9}    {told['not_recorded']} are not recorded")
    for part in told["parts"]:
        write_line(f"{part['seconds']:>9.1f} s  {part['text']}")
    for cause in told["waits_for"]:
        write_line(f"waits for {cause['waits_for']}")
        write_line(f"  what helps: {cause['helps']}")
    if told["code"]:
        write_line(f"ended with {told['code']}: {told['message']}")


@app.command()
def cancel(job_ids: JobIds, redis_url: RedisUrl = None) -> None:
    """Cancel jobs. Prints each id and state; a running job ends within a step.

    Examples:
        penstock jobs cancel JOB_ID
    """
    for job_id in job_ids:
        write_line(job_id, _run(redis_url, job_id, _cancel))


@app.command()
def retry(job_ids: JobIds, redis_url: RedisUrl = None) -> None:
    """Submit jobs again that failed, expired or were canceled. Prints the old and the new id of each job.

    Examples:
        penstock jobs retry JOB_ID
    """

    async def again(client: AsyncClient, job_id: str, tenant: str) -> str:
        return (await client.control.retry(job_id, tenant=tenant)).job_id

    for job_id in job_ids:
        write_line(job_id, _run(redis_url, job_id, again))


@app.command()
def change(
    job_id: JobId,
    not_before: Annotated[
        float | None,
        typer.Option(parser=seconds_of_text, metavar=SPAN, help="When the job may run, from now. 0: at once."),
    ] = None,
    priority: Annotated[PriorityName | None, typer.Option(help="New class of the job.")] = None,
    background: Annotated[
        bool | None, typer.Option("--background/--foreground", help="Make it background or foreground work.")
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Reschedule a job that no node runs, or change its class. Prints its state.

    Examples:
        penstock jobs change JOB_ID --not-before 3600
        penstock jobs change JOB_ID --priority standard --foreground
    """
    from penstock.contract.job_actions import JobChange

    given = JobChange.of({"not_before_s": not_before, "priority": priority, "background": background})

    async def work(client: AsyncClient, full_id: str, tenant: str) -> str:
        await client.control.change(full_id, given, tenant=tenant)
        return (await client.status(full_id, tenant=tenant)).state

    write_line(job_id, _run(redis_url, job_id, work))


@app.command()
def bulk(
    action: Annotated[ActionName, typer.Argument(help="What to do to the jobs.")],
    pool: Annotated[str | None, typer.Option(help="Pool of the jobs. Default: all pools.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Tenant of the jobs. Default: all tenants.")] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATE",
            help="State of the jobs. Repeat it for several. Default: those that the action can change.",
            autocompletion=_states,
        ),
    ] = None,
    priority: ListedClass = None,
    background: ListedKind = None,
    tag: ListedTag = None,
    custom_id: CustomId = None,
    metadata: Members = None,
    since: Since = None,
    until: Until = None,
    not_before: Annotated[
        float | None,
        typer.Option(parser=seconds_of_text, metavar=SPAN, help="For `reschedule`: when the jobs may run."),
    ] = None,
    to_priority: Annotated[PriorityName | None, typer.Option(help="For `change_class`: the new class.")] = None,
    to_background: Annotated[
        bool | None,
        typer.Option("--to-background/--to-foreground", help="For `change_class`: make them background work, or not."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, and count what would change.")] = False,
    all_jobs: Annotated[bool, typer.Option("--all", help="For `cancel` without a filter: all jobs.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="For `cancel`: do not ask.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Cancel, retry, reschedule or change the class of all jobs that the options name, and print a report as JSON.

    The action covers jobs accepted before it. If this command is killed, a gateway continues the action. `cancel` needs
    a filter beside the tenant, or --all. On a terminal it shows how many jobs it would cancel, and asks.

    Examples:
        penstock jobs bulk cancel --tag run:7 --dry-run
        penstock jobs bulk cancel --tag run:7 --yes
        penstock jobs bulk retry --state failed --since 2h
        penstock jobs bulk change_class --priority batch --to-priority standard
    """
    from penstock.contract.job_actions import JobChange, checked_class, require_filter

    change = JobChange(action, not_before, checked_class(to_priority), to_background)
    given: dict[str, Any] = {"tenant": tenant, "state": state, "since": since, "until": until, "pool": pool}
    given |= {"priority": priority, "background": background, "tag": tag, "custom_id": custom_id, "metadata": metadata}
    of_here = _filter_of(time.time(), **given)

    async def work(*, is_dry: bool) -> dict[str, Any]:
        from penstock.producer.client import AsyncClient
        from penstock.queue.broker.connection import redis_now_ms

        owner = tenant or "default"
        async with AsyncClient(redis_url_of(redis_url)) as client:
            wanted = _filter_of(await redis_now_ms(client.servers.directory.redis) / 1000, **given)
            bulk_id = await client.control.start(change, wanted, owner=owner, dry_run=is_dry, all_jobs=all_jobs)
            return (await client.control.finished(bulk_id, wanted, tenant=owner)).as_object()

    if action == "cancel" and not (dry_run or yes):
        require_filter(change, of_here, all_jobs=all_jobs)
        found = asyncio.run(work(is_dry=True))
        whose = "all tenants" if tenant is None else f"tenant {tenant}"
        num_jobs, num_running = found["changed"] + found["asked_to_stop"], found["asked_to_stop"]
        confirm(f"Cancel {num_jobs} jobs of {whose}, {num_running} of them running?", is_sure=False)
    print_object(asyncio.run(work(is_dry=dry_run)), as_json=True)


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

    async def follow(client: AsyncClient, job_id: str, tenant: str) -> None:
        job = await client.attach(job_id, after=after, tenant=tenant)
        try:
            async for chunk in job.stream():
                if chunk.choice == choice:
                    write_text(chunk.text)
        finally:
            write_line()

    _run(redis_url, job_id, follow)


@app.command()
def watch(
    after: Annotated[str | None, typer.Option(help="Cursor after which to begin. Default: now.")] = None,
    tag: Annotated[str | None, typer.Option(help="Tag of the jobs. Default: all jobs.")] = None,
    pool: Annotated[str | None, typer.Option(help="Pool of the jobs. Default: all pools.")] = None,
    tenant: Annotated[str, typer.Option(help="Tenant of the jobs.")] = "default",
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print a line for each job that ends, until Ctrl-C. Its last words are the cursor at which to continue.

    Tokenizations and rows of batches are not among the jobs.

    Examples:
        penstock jobs watch --tenant acme
        penstock jobs watch --after CURSOR --json
    """

    async def follow() -> None:
        from penstock.producer.client import AsyncClient
        from penstock.producer.client.job_objects import completion_object

        async with AsyncClient(redis_url_of(redis_url), tenant=tenant) as client:
            begin = await client.completions_cursor(pool=pool) if after is None else after
            last = begin
            try:
                async for cursor, done in client.completions(begin, tag=tag, pool=pool):
                    if as_json:
                        write_text(json.dumps(completion_object(done) | {"cursor": cursor}) + "\n")
                    else:
                        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(done.finished_ms / 1000))
                        write_text(f"{at} {done.state:9} {' '.join((done.job_id, *done.tags))}\n")
                    last = cursor
            except (asyncio.CancelledError, UnavailableError):
                write_text(f"continue with --after {last}\n", sys.stderr)
                raise

    asyncio.run(follow())


app.command()(progress)
app.command()(export)


async def _cancel(client: AsyncClient, job_id: str, tenant: str) -> str:
    return await client.cancel(job_id, tenant=tenant)


@asynccontextmanager
async def _pages(
    redis_url: str | None, pool: str | None
) -> AsyncIterator[tuple[Callable[..., Awaitable[JobPage]], int]]:
    """Yield what returns a page of jobs, and the time of Redis in ms.

    Only for pools in several Redis it loads the client, which takes longer.
    """
    from penstock.queue.broker.connection import connect, redis_now_ms

    if pool is None and pool_urls():
        from penstock.producer.client import AsyncClient

        async with AsyncClient(redis_url_of(redis_url)) as client:
            yield client.listed, await redis_now_ms(client.servers.directory.redis)
        return
    from penstock.queue.broker.job_lists import JobLists

    async with connect(redis_url_of(redis_url, pool=pool)) as redis:
        yield JobLists(redis).page, await redis_now_ms(redis)


async def _owned(client: AsyncClient, job_id: str) -> tuple[str, str]:
    """Return a job's whole id and its tenant. An id without a pool may be of any pool. Raises NotFoundError."""
    candidates = [job_id] if "." in job_id else [f"{pool}.{job_id}" for pool in await client.pools()]
    for candidate in candidates:
        try:
            return candidate, await client.servers.of_job(candidate).lists.owner(candidate)
        except NotFoundError:
            continue
    raise NotFoundError(f"no job {job_id[:100]}", code="job_not_found", param="job_id")


def _result_object(result: Result) -> dict[str, Any]:
    choices = [
        {"index": choice.index, "text": choice.text, "finish_reason": choice.finish_reason} for choice in result.choices
    ]
    return {"choices": choices}


def _run(redis_url: str | None, job_id: str, work: Callable[[AsyncClient, str, str], Awaitable[T]]) -> T:
    """Run `work` with a client, the job's whole id and its tenant."""

    async def run() -> T:
        from penstock.producer.client import AsyncClient

        async with AsyncClient(redis_url_of(redis_url)) as client:
            full_id, tenant = await _owned(client, job_id)
            return await work(client, full_id, tenant)

    return asyncio.run(run())
