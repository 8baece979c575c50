"""`penstock keys`: who may use the gateways of one Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from pydantic import ValidationError

from penstock.contract.priority import ClassName
from penstock.contract.problems import request_error
from penstock.runtime.settings import KeySettings, redis_url_of

if TYPE_CHECKING:
    from penstock.queue.broker.key_store import KeyStore
    from penstock.queue.broker.usage import UsageBroker

T = TypeVar("T")
RedisUrl = Annotated[str | None, typer.Option(help="Redis of the gateways; default: $PENSTOCK_REDIS_URL.")]
Limit = typer.Option(min=0, help="0: no limit. Limits count in each pool, over all of the tenant's keys.")

app = typer.Typer(no_args_is_help=True)


@app.callback()
def keys() -> None:
    """API keys of the gateways. The first one closes every gateway that was open."""


@app.command()
def add(
    tenant: Annotated[str, typer.Argument(help="On whose behalf the key's holder asks.")],
    scope: Annotated[list[str] | None, typer.Option(help="infer or admin; may be repeated; default: infer.")] = None,
    max_open_jobs: Annotated[int, Limit] = 0,
    max_queued_cost: Annotated[int, Limit] = 0,
    jobs_per_minute: Annotated[int, Limit] = 0,
    tokens_per_minute: Annotated[int, Limit] = 0,
    weight: Annotated[float, typer.Option(min=0.001, max=1000, help="2: twice as much as tenants of weight 1.")] = 1.0,
    burst_s: Annotated[int, typer.Option(min=1, help="So many seconds' worth of a rate may come at once.")] = 10,
    memory_percent: Annotated[int, typer.Option(min=0, max=90, help="0: as the pool's nodes say.")] = 0,
    highest_class: Annotated[ClassName, typer.Option(help="The most urgent class it may ask for.")] = "standard",
    label: Annotated[str, typer.Option(help="What the key is for.")] = "",
    redis_url: RedisUrl = None,
) -> None:
    """Make a key and print it; it cannot be shown again."""
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
    """Print every key's id, tenant, scopes, highest class and limits, and what its tenant keeps; never the key."""
    kept = _read_usage(redis_url, lambda usage: usage.kept())
    for record in sorted(_run(redis_url, lambda store: store.all()).values(), key=lambda one: one.created_s):
        limits = [f"highest_class={record.highest_class}"]
        limits += [f"{name}={value}" for name, value in record.terms.model_dump(exclude_defaults=True).items()]
        if record.tenant in kept:
            limits.append(f"kept_bytes={kept[record.tenant]}")
        state = "revoked" if record.is_revoked else ",".join(sorted(record.scopes))
        print(record.key_id, record.tenant, state, *limits, record.label)


@app.command()
def usage(
    days: Annotated[int, typer.Option(min=1, max=92, help="How many days back.")] = 31, redis_url: RedisUrl = None
) -> None:
    """Print what was used: day, pool, tenant, key, jobs, and tokens of prompts, of those cached, and of outputs."""
    for one in _read_usage(redis_url, lambda usage: usage.all(days)):
        tokens = f"prompt={one.prompt_tokens} cached={one.cached_tokens} completion={one.completion_tokens}"
        print(one.day, one.pool, one.tenant, one.account or "-", f"jobs={one.jobs}", tokens)


@app.command()
def revoke(key_id: Annotated[str, typer.Argument(help="The key's id: pk-ID-…")], redis_url: RedisUrl = None) -> None:
    """Make a key worthless, within two seconds."""
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
