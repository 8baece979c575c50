"""`penstock schedules`: jobs and batches that start by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from penstock.cli.command_line import App
from penstock.cli.options import RedisUrl
from penstock.cli.output import AsJson, JsonArray, print_object, say_empty, write_line
from penstock.contract.errors import RequestError
from penstock.contract.schedule import iso
from penstock.runtime.settings import redis_url_of

if TYPE_CHECKING:
    from penstock.producer.client import AsyncClient

T = TypeVar("T")
ScheduleArgument = Annotated[str, typer.Argument(help="Id of the schedule as printed by `list`.")]
Tenant = Annotated[str, typer.Option(help="Tenant whose schedules they are.")]
_DEFAULT_TENANT = "default"

app = App()


@app.callback()
def schedules() -> None:
    """Make, list, pause, run or delete schedules. Gateways start their jobs and batches."""


@app.command("list")
def list_schedules(tenant: Tenant = _DEFAULT_TENANT, as_json: AsJson = False, redis_url: RedisUrl = None) -> None:
    """Print one line per schedule: id, when it is due, the next run, and the runs so far."""

    async def find(client: AsyncClient) -> list[dict[str, Any]]:
        return [client.schedules.object_of(one) for one in await client.schedules.all(tenant=tenant)]

    found = _run(redis_url, find)
    if as_json:
        with JsonArray() as array:
            array.add(*found)
        return
    if not found:
        say_empty("no schedules: `penstock schedules create` makes one")
    for one in found:
        when = one.get("cron") or (f"every {one['every_s']:g} s" if "every_s" in one else f"at {one['at']}")
        zone = f" {one['zone']}" if "zone" in one else ""
        upcoming = "paused" if one["paused_since"] else f"next {one['next_runs'][0]}" if one["next_runs"] else "no more"
        counts = f"{one['started']} started, {one['missed_runs']} missed, {one['failed_runs']} failed"
        write_line(one["id"], f"{when}{zone}", upcoming, counts, one["name"] or "")


@app.command()
def show(
    schedule_id: ScheduleArgument,
    tenant: Tenant = _DEFAULT_TENANT,
    next_runs: Annotated[int, typer.Option(min=0, max=100, help="Number of next runs to show.")] = 5,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print a schedule with its next runs and its newest runs.

    Examples:
        penstock schedules show SCHEDULE_ID --next-runs 20
    """

    async def find(client: AsyncClient) -> dict[str, Any]:
        schedule = await client.schedules.get(schedule_id, tenant=tenant)
        runs = await client.schedules.runs(schedule_id, tenant=tenant)
        shown = schedule.as_object(client.schedules.next_runs(schedule, next_runs))
        return shown | {"runs": [run.as_object() for run in runs]}

    print_object(_run(redis_url, find), as_json=as_json)


@app.command()
def create(
    prompt: Annotated[str | None, typer.Argument(help="Prompt of the job that each run starts.")] = None,
    cron: Annotated[str | None, typer.Option(help="Cron line: minute, hour, day, month, day of the week.")] = None,
    zone: Annotated[str, typer.Option(help="Time zone of the cron line, such as Europe/Berlin.")] = "UTC",
    every: Annotated[float | None, typer.Option(help="Seconds between two runs.")] = None,
    at: Annotated[str | None, typer.Option(help="Moment of one run, such as 2026-12-24T08:00:00+01:00.")] = None,
    model: Annotated[str | None, typer.Option(help="Model of the job. Optional if only one is served.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of the answer.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Tag of the jobs. Repeat it for several, up to 3.")] = None,
    batch: Annotated[str | None, typer.Option(help="Id of a stored file: each run starts a batch over it.")] = None,
    endpoint: Annotated[
        str, typer.Option(help="Endpoint of the rows of the batch; flow: a flow.")
    ] = "/v1/chat/completions",
    name: Annotated[str, typer.Option(help="Your name of the schedule.")] = "",
    missed: Annotated[
        Literal["skip", "one", "all"], typer.Option(help="Which runs start whose time passed while no gateway ran.")
    ] = "one",
    overlap: Annotated[
        Literal["skip", "wait", "cancel"], typer.Option(help="What a run does while the run before goes on.")
    ] = "skip",
    tenant: Tenant = _DEFAULT_TENANT,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Make a schedule of a job with this prompt, or of a batch, and print it with its next runs.

    Examples:
        penstock schedules create "Report." --cron "0 3 * * *" --zone Europe/Berlin
        penstock schedules create "Say hello." --every 3600 --overlap wait
        penstock schedules create --batch FILE_ID --cron "0 22 * * 5"
        penstock schedules create --batch FILE_ID --endpoint flow --every 3600
    """
    if (prompt is None) == (batch is None):
        raise RequestError("prompt: give either a prompt or --batch", param="prompt")
    when: dict[str, Any] = {"cron": cron, "zone": zone, "every_s": every, "at": _moment_of(at)}
    given = when | {"name": name, "missed": missed, "overlap": overlap, "tenant": tenant}

    async def make(client: AsyncClient) -> dict[str, Any]:
        if batch is not None:
            made = await client.schedules.create_batch(batch, endpoint, **given)
        else:
            chat = [{"role": "user", "content": prompt or ""}]
            limit: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
            made = await client.schedules.create(chat, model=model, tags=tag, **limit, **given)
        return client.schedules.object_of(made)

    print_object(_run(redis_url, make), as_json=as_json)


@app.command()
def pause(schedule_id: ScheduleArgument, tenant: Tenant = _DEFAULT_TENANT, redis_url: RedisUrl = None) -> None:
    """Let a schedule be due no more, until it is resumed.

    Examples:
        penstock schedules pause SCHEDULE_ID
    """
    _run(redis_url, lambda client: client.schedules.pause(schedule_id, tenant=tenant))
    write_line(f"{schedule_id}: paused; `penstock schedules resume {schedule_id}` lets it go on")


@app.command()
def resume(schedule_id: ScheduleArgument, tenant: Tenant = _DEFAULT_TENANT, redis_url: RedisUrl = None) -> None:
    """Let a paused schedule be due again, from now on.

    Examples:
        penstock schedules resume SCHEDULE_ID
    """
    schedule = _run(redis_url, lambda client: client.schedules.resume(schedule_id, tenant=tenant))
    write_line(
        f"{schedule_id}: next run {iso(schedule.next_ms)}" if schedule.next_ms else f"{schedule_id}: no more runs"
    )


@app.command("run")
def run_now(schedule_id: ScheduleArgument, tenant: Tenant = _DEFAULT_TENANT, redis_url: RedisUrl = None) -> None:
    """Let a run be due now, beside the others. A gateway starts it within seconds.

    Examples:
        penstock schedules run SCHEDULE_ID
    """
    _run(redis_url, lambda client: client.schedules.run_now(schedule_id, tenant=tenant))
    write_line(f"{schedule_id}: due now; `penstock schedules show {schedule_id}` shows the run")


@app.command()
def delete(schedule_id: ScheduleArgument, tenant: Tenant = _DEFAULT_TENANT, redis_url: RedisUrl = None) -> None:
    """Delete a schedule. The jobs and batches that it started go on.

    Examples:
        penstock schedules delete SCHEDULE_ID
    """
    _run(redis_url, lambda client: client.schedules.delete(schedule_id, tenant=tenant))
    write_line(f"{schedule_id}: deleted")


def _moment_of(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:
        raise RequestError(f"at: {text!r} is no time, such as 2026-12-24T08:00:00+01:00", param="at") from None


def _run(redis_url: str | None, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
    async def run() -> T:
        from penstock.producer.client import AsyncClient

        async with AsyncClient(redis_url_of(redis_url)) as client:
            return await work(client)

    return asyncio.run(run())
