"""`penstock dead`: the dead letters, which are jobs that were given up after their nodes died repeatedly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.cli.command_line import App
from penstock.cli.options import RedisUrl
from penstock.cli.output import AsJson, JsonArray, confirm, print_object, say_empty, time_in_words, write_line
from penstock.contract.errors import RequestError
from penstock.runtime.settings import redis_url_of

if TYPE_CHECKING:
    from penstock.producer.client import AsyncClient
    from penstock.queue.broker.job_lists import DeadLetter
    from penstock.queue.wire import Request


T = TypeVar("T")
JobIds = Annotated[list[str], typer.Argument(help="Job ids as printed by `list`.")]

app = App()


@app.callback()
def dead() -> None:
    """Show, retry or delete dead letters.

    A job becomes a dead letter when its nodes died three times without progress. Dead letters are kept for 7 days.
    """


@app.command("list")
def list_letters(
    pool: Annotated[
        list[str] | None, typer.Option(help="Pool to list. Repeat it for several. Default: all pools.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most dead letters per pool, newest first.")] = 100,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print one line per dead letter: job id, time of death, tenant, number of chunks, and the lost nodes."""

    async def find(client: AsyncClient) -> list[Any]:
        pools = pool or sorted(await client.pools())
        return [letter for name in pools for letter in await client.dead.newest(name, limit)]

    letters = _run(redis_url, find)
    if as_json:
        with JsonArray() as array:
            array.add(*map(_letter_object, letters))
        return
    if not letters:
        say_empty("no dead letters")
    for letter in letters:
        nodes = ",".join(loss.node_id for loss in letter.losses)
        write_line(letter.job_id, time_in_words(letter.died_ms), letter.tenant, f"{letter.num_chunks} chunks", nodes)


@app.command()
def show(
    job_id: Annotated[str, typer.Argument(help="Job id as printed by `list`.")],
    prompt: Annotated[bool, typer.Option("--prompt", help="Include the prompt itself, not only its length.")] = False,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print a dead letter and its request.

    Examples:
        penstock dead show JOB_ID
        penstock dead show JOB_ID --prompt --json
    """

    async def find(client: AsyncClient) -> dict[str, Any]:
        letter, request = await client.dead.get(job_id), await client.dead.request(job_id)
        shown = _request_as_json(request, with_texts=prompt)
        return _letter_object(letter) | {"request": shown}

    print_object(_run(redis_url, find), as_json=as_json)


@app.command()
def retry(job_ids: JobIds, redis_url: RedisUrl = None) -> None:
    """Submit dead letters again. Prints the old and the new id of each job.

    Examples:
        penstock dead retry JOB_ID
    """

    async def again(client: AsyncClient) -> None:
        for job_id in job_ids:
            write_line(job_id, (await client.dead.retry(job_id)).id)

    _run(redis_url, again)


@app.command()
def purge(
    job_ids: Annotated[list[str] | None, typer.Argument(help="Job ids as printed by `list`.")] = None,
    all_of: Annotated[
        str | None, typer.Option("--all", metavar="POOL", help="Delete all dead letters of this pool.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before all of a pool are deleted.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Delete dead letters and their requests.

    Examples:
        penstock dead purge JOB_ID
        penstock dead purge --all POOL --yes
    """
    if bool(job_ids) == bool(all_of):
        raise RequestError("give either job ids or --all POOL", param="job_ids")
    if all_of is not None:
        confirm(f"Delete all dead letters of pool {all_of}?", is_sure=yes)

    async def forget(client: AsyncClient) -> int:
        return await (client.dead.purge(job_ids or []) if all_of is None else client.dead.purge_all(all_of))

    write_line(_run(redis_url, forget), "deleted")


def _request_as_json(request: Request, *, with_texts: bool) -> dict[str, Any]:
    """Return a job's request. Unless `with_texts`, only the lengths of its prompt, messages and tools are included."""
    messages = request.messages and [message.model_dump() for message in request.messages]
    forms = {
        "prompt": request.prompt,
        "prompt_token_ids": request.prompt_token_ids,
        "messages": messages,
        "tools": request.tools,
    }
    texts = {name: form if with_texts else f"{len(form)} long" for name, form in forms.items() if form is not None}
    adapter = {} if request.adapter is None else {"adapter": request.adapter.model_dump()}
    task = {} if request.task is None else {"task": request.task.model_dump()}
    return {"params": request.params.model_dump(exclude_defaults=True)} | task | adapter | texts


def _letter_object(letter: DeadLetter) -> dict[str, Any]:
    return asdict(letter) | {"priority": letter.priority.name.lower()}


def _run(redis_url: str | None, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
    async def run() -> T:
        from penstock.producer.client import AsyncClient

        async with AsyncClient(redis_url_of(redis_url)) as client:
            return await work(client)

    return asyncio.run(run())
