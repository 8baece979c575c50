"""`penstock keys`: the API keys of the gateways that share one Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import ValidationError

from penstock.contract.priority import ClassName
from penstock.contract.problems import request_error
from penstock.runtime.settings import KeySettings, redis_url_of

if TYPE_CHECKING:
    from penstock.queue.broker.key_store import KeyStore
    from penstock.queue.broker.usage import UsageBroker

T = TypeVar("T")
RedisUrl = Annotated[str | None, typer.Option(help="URL of the gateways' Redis. Default: $PENSTOCK_REDIS_URL.")]


def _limit(what: str) -> Any:
    return typer.Option(min=0, help=f"Most {what}, per pool and over all of the tenant's keys. 0: no limit.")


app = typer.Typer(no_args_is_help=True)


@app.callback()
def keys() -> None:
    """Manage the gateways' API keys. After the first key is added, every gateway requires a key."""


@app.command()
def add(
    tenant: Annotated[str, typer.Argument(help="Tenant for which the key's requests are made.")],
    scope: Annotated[list[str] | None, typer.Option(help="infer or admin. Repeat it for both. Default: infer.")] = None,
    max_open_jobs: Annotated[int, _limit("jobs that wait or run")] = 0,
    max_queued_cost: Annotated[int, _limit("estimated KV tokens of waiting jobs")] = 0,
    jobs_per_minute: Annotated[int, _limit("jobs submitted per minute")] = 0,
    tokens_per_minute: Annotated[int, _limit("prompt and output tokens per minute")] = 0,
    weight: Annotated[
        float, typer.Option(min=0.001, max=1000, help="Share of a busy pool. 2 gets twice as much as weight 1.")
    ] = 1.0,
    burst_s: Annotated[
        int, typer.Option(min=1, help="Burst of a rate limit: this many seconds' worth may come at once.")
    ] = 10,
    memory_percent: Annotated[
        int, typer.Option(min=0, max=90, help="Percent of Redis's memory for the tenant. 0: as set for the pool.")
    ] = 0,
    highest_class: Annotated[
        ClassName, typer.Option(help="Most urgent priority class that the key may use.")
    ] = "standard",
    label: Annotated[str, typer.Option(help="Note on what the key is for.")] = "",
    redis_url: RedisUrl = None,
) -> None:
    """Create a key and print it. The key cannot be shown again."""
    from penstock.contract.terms import Terms

    try:
        terms = Terms(
            max_open_jobs=max_open_jobs,
            max_queued_cost=max_queued_cost,
            jobs_per_minute=jobs_per_minute,
            tokens_per_minute=tokens_per_minute,
            weight=weight,
            burst_s=burst_s,
            memory_percent=memory_percent,
        )
    except ValidationError as error:
        raise request_error(error) from error
    pepper, scopes = KeySettings.load().key_pepper, scope or ["infer"]
    key, _ = _run(
        redis_url,
        lambda store: store.add(tenant, scopes, terms, highest_class=highest_class, label=label, pepper=pepper),
    )
    print(key)


@app.command("list")
def list_keys(redis_url: RedisUrl = None) -> None:
    """Print each key's id, tenant, scopes, highest class, limits and the bytes that its tenant keeps in Redis."""
    kept = _read_usage(redis_url, lambda usage: usage.kept())
    for record in sorted(_run(redis_url, lambda store: store.all()).values(), key=lambda key: key.created_s):
        limits = [f"highest_class={record.highest_class}"]
        limits += [f"{name}={value}" for name, value in record.terms.model_dump(exclude_defaults=True).items()]
        if record.tenant in kept:
            limits.append(f"kept_bytes={kept[record.tenant]}")
        state = "revoked" if record.is_revoked else ",".join(sorted(record.scopes))
        print(record.key_id, record.tenant, state, *limits, record.label)


@app.command()
def usage(
    days: Annotated[int, typer.Option(min=1, max=92, help="Number of days to look back.")] = 31,
    redis_url: RedisUrl = None,
) -> None:
    """Print the usage per day, pool, tenant and key: jobs, and prompt, cached and completion tokens."""
    for row in _read_usage(redis_url, lambda usage: usage.all(days)):
        tokens = f"prompt={row.prompt_tokens} cached={row.cached_tokens} completion={row.completion_tokens}"
        print(row.day, row.pool, row.tenant, row.account or "-", f"jobs={row.jobs}", tokens)


@app.command()
def revoke(key_id: Annotated[str, typer.Argument(help="The key's id: pk-ID-…")], redis_url: RedisUrl = None) -> None:
    """Revoke a key. Every gateway refuses it within two seconds."""
    _run(redis_url, lambda store: store.revoke(key_id))


def _read_usage(redis_url: str | None, read: Callable[[UsageBroker], Awaitable[T]]) -> T:
    async def run() -> T:
        from penstock.queue.broker.connection import connect
        from penstock.queue.broker.usage import UsageBroker

        async with connect(redis_url_of(redis_url)) as redis:
            return await read(UsageBroker(redis))

    return asyncio.run(run())


def _run(redis_url: str | None, work: Callable[[KeyStore], Awaitable[T]]) -> T:
    async def run() -> T:
        from penstock.queue.broker.connection import connect
        from penstock.queue.broker.key_store import KeyStore

        redis = connect(redis_url_of(redis_url))
        try:
            return await work(KeyStore(redis))
        finally:
            await redis.aclose()

    return asyncio.run(run())
