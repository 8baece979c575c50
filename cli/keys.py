"""The commands of `penstock keys`."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_args

import typer
from pydantic import ValidationError

from penstock.cli.command_line import App
from penstock.cli.options import RedisUrl, options_of, takes
from penstock.cli.output import AsJson, JsonArray, print_object, say_empty, write_line
from penstock.contract.durability import MEMORY, Durability
from penstock.contract.errors import RequestError
from penstock.contract.priority import ClassName
from penstock.contract.problems import request_error
from penstock.contract.tenant import NO_LIMIT, OPENED, ApiKey, Scope, Terms, keys_in_use, opened_s
from penstock.contract.usage import (
    MAX_DAYS,
    MAX_PAGE_ROWS,
    Period,
    PeriodUsage,
    TenantHoldings,
    UsageQuery,
    csv_of,
    usage_object,
)
from penstock.runtime.settings import KeySettings, redis_url_of, redis_urls_of

if TYPE_CHECKING:
    from penstock.contract.usage import UsagePage
    from penstock.producer.client.servers import QueueServers
    from penstock.queue.broker.producer import ServedPool
    from penstock.queue.broker.usage import UsageBroker
    from penstock.queue.tenants.key_store import KeyStore


_WITHOUT_LIMIT = {"memory_percent": "as set for the pool"}
"""Limit → its text if a key does not set it; that of others is "no limit"."""


def record_object(key: ApiKey) -> dict[str, Any]:
    """Return a key as a JSON object, without its digest and its usage."""
    return {
        "object": "api_key",
        "id": key.key_id,
        "tenant": key.tenant,
        "label": key.label,
        "state": "revoked" if key.is_revoked else "active",
        "created": datetime.fromtimestamp(key.created_s, UTC).isoformat(),
        "scopes": sorted(key.scopes),
        "highest_class": key.highest_class,
        "models": sorted(key.models),
        "limits": key.terms.model_dump(exclude={"account"}),
    }


def key_object(key: ApiKey, num_kept_bytes: int, used: Sequence[int], days: int) -> dict[str, Any]:
    """Return a key with its usage as a JSON object.

    `num_kept_bytes` is what its tenant stores in Redis. `used` counts jobs and prompt, completion and cached tokens of
    the last `days`.
    """
    jobs, prompt, completion, cached = used
    return {
        **record_object(key),
        "tenant_kept_bytes": num_kept_bytes,
        "usage": {
            "days": days,
            "jobs": jobs,
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "completion_tokens": completion,
        },
    }


def lines_of(shown: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each value of a `key_object`."""
    for name, value in shown.items():
        if name == "limits":
            for limit, number in value.items():
                yield _line(limit, _WITHOUT_LIMIT.get(limit, "no limit") if number == NO_LIMIT else number)
        elif name == "usage":
            counts = " ".join(f"{counter}={count}" for counter, count in value.items() if counter != "days")
            yield _line("usage", f"{counts} (last {value['days']} days)")
        elif name != "object":
            text = ",".join(value) if isinstance(value, list) else value
            yield _line(name, "all" if name == "models" and not value else text)


def line_of(key: ApiKey, num_kept_bytes: int | None, used: Sequence[int] | None) -> str:
    """Return the line of a key in `penstock keys list`, without unset limits and without zero usage."""
    state = "revoked" if key.is_revoked else ",".join(sorted(key.scopes))
    words = [key.key_id, key.tenant, state, f"highest_class={key.highest_class}"]
    words += [f"{name}={value}" for name, value in key.terms.model_dump(exclude_defaults=True).items()]
    if key.models:
        words.append(f"models={','.join(sorted(key.models))}")
    if num_kept_bytes is not None:
        words.append(f"kept_bytes={num_kept_bytes}")
    if used is not None:
        jobs, prompt, completion, _ = used
        words += [f"jobs={jobs}", f"tokens={prompt + completion}"]
    return " ".join([*words, key.label])


def usage_line_of(row: PeriodUsage) -> str:
    """Return a line of `penstock keys usage`."""
    tokens = f"prompt={row.prompt_tokens} cached={row.cached_tokens} completion={row.completion_tokens}"
    return f"{row.label} {row.pool} {row.tenant} {row.account or '-'} jobs={row.jobs} {tokens}"


def holdings_line_of(found: TenantHoldings) -> str:
    """Return the line of what a tenant has now."""
    known = found.with_limits()
    texts = (f"{name}={one['used']}" + (f"/{one['limit']}" if one["limit"] else "") for name, one in known.items())
    return f"now {' '.join(texts)}"


def _line(name: str, value: object) -> str:
    return f"{name:<18} {value}".rstrip()


# --- the commands

T = TypeVar("T")
KeyName = Annotated[
    str,
    typer.Argument(
        help="The key's id (as in pk-ID-SECRET), or its label or tenant if no other key in use has that name."
    ),
]
Days = Annotated[int, typer.Option(min=1, max=MAX_DAYS, help="Days of usage to add up.")]
Scopes = Annotated[
    list[str] | None,
    typer.Option(
        help=f"What the key may do: {', '.join(get_args(Scope))}. Repeat it for several. A new key has infer.",
        rich_help_panel="Key",
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        help="Model, alias or adapter that the key may use; others are unlisted and not found. Repeat it for several; "
        "* allows all. A new key may use all.",
        rich_help_panel="Key",
    ),
]
LIMITS = tuple(name for name in Terms.model_fields if name != "account")
DEFAULT_DAYS = 31
NOTHING = (0, 0, 0, 0)
"""Usage of a key without jobs."""


class Usages:
    """The usage of the pools in several Redis. Raises UnavailableError if one is away."""

    def __init__(self, servers: QueueServers) -> None:
        self._servers = servers

    async def page(self, query: UsageQuery, *, after: str | None = None) -> UsagePage:
        """Return a page of a report."""
        return await self._servers.usage(query, after, MAX_PAGE_ROWS)

    async def per_owner(self, query: UsageQuery) -> dict[tuple[str, str], list[int]]:
        """Return the sums of jobs and of prompt, completion and cached tokens, by tenant and account."""
        from penstock.queue.broker.usage import per_owner

        return await per_owner(self.page, query)

    async def kept(self) -> dict[str, int]:
        """Return the bytes of memory that each tenant occupies in all of them."""
        sums = Counter[str]()
        for one in self._servers.require_all():
            sums.update(await one.usage.kept())
        return dict(sums)


class Brokers(NamedTuple):
    """What the commands read and write: the keys, and what the pools know."""

    keys: KeyStore
    usage: UsageBroker | Usages
    pools: Callable[[], Awaitable[Mapping[str, ServedPool]]]


app = App()


@app.callback()
def keys() -> None:
    """Manage the gateways' API keys. After the first key is added, every gateway requires a key."""


@app.command()
@takes(*options_of(Terms, LIMITS))
def add(
    tenant: Annotated[str, typer.Argument(help="Tenant for which the key's requests are made.")],
    scope: Scopes = None,
    highest_class: Annotated[
        ClassName, typer.Option(help="Most urgent priority class that the key may use.", rich_help_panel="Key")
    ] = "standard",
    label: Annotated[str, typer.Option(help="Note on what the key is for.", rich_help_panel="Key")] = "",
    models: Models = None,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
    **limits: Any,
) -> None:
    """Create a key and print it. The key cannot be shown again. JSON has the key, its id and what it may do.

    Examples:
        penstock keys add acme --max-open-jobs 100 --tokens-per-minute 60000
        penstock keys add chat --highest-class interactive
        penstock keys add prometheus --scope metrics
        penstock keys add shop --models chat-small --models shop-adapter
    """
    try:
        terms = Terms(**_given(limits))
    except ValidationError as error:
        raise request_error(error) from error
    pepper, scopes = KeySettings.load().key_pepper, scope or ["infer"]

    async def create(store: KeyStore) -> tuple[str, ApiKey]:
        names = _models_of(models) or ()
        return await store.add(
            tenant, scopes, terms, highest_class=highest_class, label=label, models=names, pepper=pepper
        )

    key, record = _with_keys(redis_url, create)
    if as_json:
        print_object({"key": key, **record_object(record)}, as_json=True)
    else:
        write_line(key)


@app.command("set")
@takes(*options_of(Terms, LIMITS, shows_defaults=False))
def set_key(
    name: KeyName,
    scope: Scopes = None,
    highest_class: Annotated[
        ClassName | None, typer.Option(help="Most urgent priority class that the key may use.", rich_help_panel="Key")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Note on what the key is for.", rich_help_panel="Key")] = None,
    models: Models = None,
    redis_url: RedisUrl = None,
    **limits: Any,
) -> None:
    """Change a key's limits, scopes, class or label, and print its line. An option that is not given changes nothing.

    The key itself stays valid. Every gateway applies the change to new requests within two seconds. Accepted jobs keep
    the terms with which they were submitted.

    Examples:
        penstock keys set acme --tokens-per-minute 120000
    """
    terms = _given(limits)
    changes = _given({"scopes": scope, "highest_class": highest_class, "label": label, "models": _models_of(models)})
    if not terms and not changes:
        raise RequestError("nothing to change: give at least one option, such as --tokens-per-minute", param="name")

    async def change(store: KeyStore) -> ApiKey:
        return await store.change((await store.find(name)).key_id, changes, terms)

    write_line(line_of(_with_keys(redis_url, change), None, None))


@app.command()
def show(name: KeyName, days: Days = DEFAULT_DAYS, as_json: AsJson = False, redis_url: RedisUrl = None) -> None:
    """Print one key's state, scopes, limits, usage, and the bytes that its tenant keeps in Redis."""

    async def find(brokers: Brokers) -> dict[str, Any]:
        key = await brokers.keys.find(name)
        query = UsageQuery(days=days, tenant=key.tenant, account=key.key_id)
        used = (await brokers.usage.per_owner(query)).get((key.tenant, key.key_id), NOTHING)
        return key_object(key, (await brokers.usage.kept()).get(key.tenant, 0), used, days)

    shown = _run(redis_url, find)
    if as_json:
        print_object(shown, as_json=True)
    else:
        write_line("\n".join(lines_of(shown)))


@app.command("list")
def list_keys(days: Days = DEFAULT_DAYS, as_json: AsJson = False, redis_url: RedisUrl = None) -> None:
    """Print each key's id, tenant, scopes, class, limits, stored bytes of its tenant, and usage of the last days.

    Keys are in the directory. Where PENSTOCK_POOLS names several Redis, bytes and usage are those of all; with
    --redis-url, those of that Redis alone.
    """

    async def find(brokers: Brokers) -> tuple[list[tuple[ApiKey, int | None, list[int] | None]], int]:
        known, kept = await brokers.keys.records(), await brokers.usage.kept()
        since_s = opened_s(known)
        known.pop(OPENED, None)
        used = await brokers.usage.per_owner(UsageQuery(days=days))
        by_age = sorted(known.values(), key=lambda key: key.created_s)
        return [(key, kept.get(key.tenant), used.get((key.tenant, key.key_id))) for key in by_age], since_s

    found, since_s = _run(redis_url, find)
    if as_json:
        with JsonArray() as array:
            array.add(*(key_object(key, kept or 0, used or NOTHING, days) for key, kept, used in found))
        return
    if not found:
        say_empty("no API keys")
    for key, kept, used in found:
        write_line(line_of(key, kept, used))
    if since_s:
        say_empty(f"gateways on a loopback address are open since {datetime.fromtimestamp(since_s, UTC).isoformat()}")


@app.command()
def usage(
    name: Annotated[str | None, typer.Argument(help="A key, as for `show`. Default: all keys.")] = None,
    days: Annotated[int | None, typer.Option(min=1, max=MAX_DAYS, help="Days up to the end. Default: 31.")] = None,
    start: Annotated[str | None, typer.Option(help="First day (2026-11-22), or hour (2026-11-22T05), in UTC.")] = None,
    end: Annotated[str | None, typer.Option(help="Last day or hour, which is part of it. Default: now.")] = None,
    by: Annotated[Period, typer.Option(help="Length of a row. Usage by hour is kept for 3 days.")] = "day",
    pool: Annotated[list[str] | None, typer.Option(help="Pool to show. Repeat it for several. Default: all.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of text for people.")] = False,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print the usage per day, pool, tenant and key: jobs, and prompt, cached and completion tokens.

    For one key, a line on stderr says how many schedules, open batches and concurrency keys its tenant has now.

    Examples:
        penstock keys usage acme --by hour --csv
    """
    if as_csv and as_json:
        raise RequestError("give --csv or --json, not both", param="as_csv")

    async def report(brokers: Brokers) -> None:
        query = UsageQuery(by, start, end, days, frozenset(pool) if pool else None)
        if name is not None:
            key = await brokers.keys.find(name)
            query = replace(query, tenant=key.tenant, account=key.key_id)
        models = {served: record.model for served, record in (await brokers.pools()).items()}
        after, is_first = None, True
        with JsonArray() if as_json else nullcontext() as array:
            while is_first or after is not None:
                page = await brokers.usage.page(query, after=after)
                objects = [usage_object(row, models.get(row.pool)) for row in page.rows]
                if array is not None:
                    array.add(*objects)
                elif as_csv:
                    write_line(csv_of(objects, with_head=is_first), end="")
                else:
                    write_line("".join(f"{usage_line_of(row)}\n" for row in page.rows), end="")
                after, is_first = page.next_after, False
            if page.holdings is not None and array is None and not as_csv:
                # The lines on stdout are rows.
                write_line(holdings_line_of(page.holdings), file=sys.stderr)

    _run(redis_url, report)


@app.command()
def revoke(
    name: KeyName,
    durability: Annotated[
        Durability, typer.Option(help="What the command waits for: Redis, its disk, or a replica of it.")
    ] = MEMORY,
    redis_url: RedisUrl = None,
) -> None:
    """Revoke a key. Every gateway refuses it within two seconds.

    Where PENSTOCK_POOLS names several Redis, only the directory has keys: the key is refused for all pools, also while
    the Redis of a pool is away. If the command fails, repeat it: to revoke a revoked key changes nothing.

    Examples:
        penstock keys revoke acme
        penstock keys revoke 4f2c9b0d1e8a7c63 --durability replicated
    """

    async def end(store: KeyStore) -> bool:
        await store.revoke((await store.find(name, or_revoked=True)).key_id, durability)
        return not keys_in_use(await store.all())

    if _with_keys(redis_url, end):
        say_empty(
            "no API key is in use now, and gateways still need one: `penstock keys add TENANT` makes one, and "
            "`penstock keys open` lets programs of this machine do without"
        )


@app.command("open")
def open_again(redis_url: RedisUrl = None) -> None:
    """Let gateways on a loopback address serve callers without a key again, until the next key is added.

    It is for the time after the last key: keys were tried, or are lost. While a key is in use, it is refused. Gateways
    that other machines reach, and those with --require-keys or --api-key, still need a key.
    """
    _with_keys(redis_url, lambda store: store.open())


def _models_of(given: list[str] | None) -> frozenset[str] | None:
    """Return the names that a key shall list, none for all; None if no option was given."""
    return None if given is None else frozenset(given) - {"*"} if "*" not in given else frozenset()


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _with_keys(redis_url: str | None, work: Callable[[KeyStore], Awaitable[T]]) -> T:
    """Run what needs the directory alone, so that no other Redis can hinder it."""

    async def run() -> T:
        from penstock.queue.broker.connection import connect
        from penstock.queue.tenants.key_store import KeyStore

        async with connect(redis_url_of(redis_url)) as redis:
            return await work(KeyStore(redis))

    return asyncio.run(run())


def _run(redis_url: str | None, work: Callable[[Brokers], Awaitable[T]]) -> T:
    async def run() -> T:
        from penstock.queue.broker.connection import connect
        from penstock.queue.broker.producer import ProducerBroker
        from penstock.queue.broker.usage import UsageBroker
        from penstock.queue.tenants.key_store import KeyStore

        url = redis_url_of(redis_url)
        if len(redis_urls_of(redis_url)) > 1:
            from penstock.producer.client import AsyncClient

            async with AsyncClient(url) as client:
                store = KeyStore(client.servers.directory.redis)
                return await work(Brokers(store, Usages(client.servers), client.pools))
        async with connect(url) as redis:
            return await work(Brokers(KeyStore(redis), UsageBroker(redis), ProducerBroker(redis).pools))

    return asyncio.run(run())
