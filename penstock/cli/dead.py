"""`penstock dead`: jobs that were given up because their nodes died of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.contract.errors import RequestError
from penstock.runtime.settings import redis_url_of

if TYPE_CHECKING:
    from penstock.producer.client import AsyncClient
    from penstock.queue.wire import Request

T = TypeVar("T")
RedisUrl = Annotated[str | None, typer.Option(help="Redis of the pools; default: $PENSTOCK_REDIS_URL.")]
JobIds = Annotated[list[str], typer.Argument(help="Ids as `list` prints them.")]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def dead() -> None:
    """Dead letters: jobs whose nodes died three times without progress. They are kept for 7 days."""


@app.command("list")
def list_letters(
    pool: Annotated[list[str] | None, typer.Option(help="May be repeated; default: all.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most of each pool, the newest ones.")] = 100,
    redis_url: RedisUrl = None,
) -> None:
    """Print one line per dead letter: id, when it died, tenant, chunks it had, the nodes that were lost."""

    async def find(client: AsyncClient) -> list[Any]:
        pools = pool or sorted(await client.pools())
        return [letter for name in pools for letter in await client.dead.newest(name, limit)]

    for letter in _run(redis_url, find):
        nodes = ",".join(loss.node_id for loss in letter.losses)
        print(letter.job_id, _time(letter.died_ms), letter.tenant, f"{letter.num_chunks} chunks", nodes)


@app.command()
def show(
    job_id: Annotated[str, typer.Argument(help="The dead letter's id.")],
    prompt: Annotated[bool, typer.Option("--prompt", help="With the prompt itself, not only its size.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print all that is known of a dead letter, as JSON."""

    async def find(client: AsyncClient) -> dict[str, Any]:
        letter, request = await client.dead.get(job_id), await client.dead.request(job_id)
        asked = _asked(request, with_texts=prompt)
        return asdict(letter) | {"priority": letter.priority.name.lower(), "request": asked}

    print(json.dumps(_run(redis_url, find), indent=2, ensure_ascii=False))


@app.command()
def retry(job_ids: JobIds, redis_url: RedisUrl = None) -> None:
    """Submit dead letters again, each under a new id, which is printed behind the old one."""

    async def again(client: AsyncClient) -> None:
        for job_id in job_ids:
            print(job_id, (await client.dead.retry(job_id)).id, flush=True)

    _run(redis_url, again)


@app.command()
def purge(
    job_ids: Annotated[list[str] | None, typer.Argument(help="Ids as `list` prints them.")] = None,
    all_of: Annotated[str | None, typer.Option("--all", help="All dead letters of this pool.")] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Forget dead letters and their requests."""
    if bool(job_ids) == bool(all_of):
        raise RequestError("say which: ids, or --all POOL", param="job_ids")

    async def forget(client: AsyncClient) -> int:
        if all_of is None:
            return await client.dead.purge(job_ids or [])
        num_purged = 0
        while letters := await client.dead.newest(all_of):
            num_purged += await client.dead.purge([letter.job_id for letter in letters])
        return num_purged

    print(_run(redis_url, forget), "forgotten")


def _asked(request: Request, *, with_texts: bool) -> dict[str, Any]:
    """What the job asked for; of texts, tokens and turns no more than how long they are unless `with_texts`."""
    messages = request.messages and [message.model_dump() for message in request.messages]
    forms = {
        "prompt": request.prompt,
        "prompt_token_ids": request.prompt_token_ids,
        "messages": messages,
        "tools": request.tools,
    }
    asked = {name: form if with_texts else f"{len(form)} long" for name, form in forms.items() if form is not None}
    adapter = {} if request.adapter is None else {"adapter": request.adapter.model_dump()}
    return {"params": request.params.model_dump(exclude_defaults=True)} | adapter | asked


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="seconds")


def _run(redis_url: str | None, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
    async def run() -> T:
        from penstock.producer.client import AsyncClient

        async with AsyncClient(redis_url_of(redis_url)) as client:
            return await work(client)

    return asyncio.run(run())
