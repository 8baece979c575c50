"""`penstock pools`: list the pools with their load, declare and pause them, and remove those no longer served."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.command_line import App
from penstock.cli.options import RedisUrl
from penstock.cli.output import AsJson, JsonArray, say_empty, write_line
from penstock.contract.priority import Priority
from penstock.contract.tool_formats import BY_NAME
from penstock.runtime.settings import pool_urls, redis_url_of

if TYPE_CHECKING:
    from penstock.contract.pauses import Pause
    from penstock.contract.pool import PoolStats
    from penstock.queue.broker.producer import ServedPool


_MIB = 1 << 20
_SHOWN_BYTES = _MIB // 10
"""From this many bytes on, a pool's line shows the data that its tenants keep in Redis."""

PoolArgument = Annotated[str, typer.Argument(help="Name of the pool as printed by `list`.")]
PausedTenant = Annotated[str | None, typer.Option(help="Only this tenant's jobs.")]
PausedClass = Annotated[
    Literal["interactive", "standard", "batch"] | None, typer.Option(help="Only jobs of this class.")
]
PausedKind = Annotated[
    bool | None, typer.Option("--background/--foreground", help="Only background or foreground jobs.")
]

app = App()


@app.callback()
def pools() -> None:
    """List, declare, pause or remove pools. A pool is the nodes of one model and the jobs that wait for them."""


@app.command("list")
def list_pools(
    all_pools: Annotated[bool, typer.Option("--all", help="Show a line for each pool without nodes, too.")] = False,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Print one line per pool: nodes, open and queued jobs, KV cache usage, and tokens per second.

    Pools that had neither a node nor an open job for an hour share one line.
    """
    found, served = asyncio.run(_stats(redis_url_of(redis_url)))
    if as_json:
        with JsonArray() as array:
            array.add(*(object_of(pool, served.get(pool.pool)) for pool in found))
        return
    if not found:
        say_empty("no pools: `penstock serve` or `penstock node` starts one")
    folded = [name for pool in found if (name := pool.pool) in served and served[name].is_folded(pool.num_open)]
    for pool in found:
        if all_pools or pool.pool not in folded:
            write_line(line_of(pool, served.get(pool.pool)))
    if folded and not all_pools:
        write_line(f"without a node for an hour or more (--all shows them, `forget` removes one): {', '.join(folded)}")


@app.command()
def pause(
    pool: PoolArgument,
    tenant: PausedTenant = None,
    priority: PausedClass = None,
    background: PausedKind = None,
    redis_url: RedisUrl = None,
) -> None:
    """Let nodes take no more jobs of a pool, a class or a tenant. Running jobs go on. Prints all pauses as JSON.

    Examples:
        penstock pools pause POOL
        penstock pools pause POOL --priority batch --background
        penstock pools pause POOL --tenant TENANT
    """
    _set_pause(redis_url, pool, on=True, tenant=tenant, priority=priority, background=background)


@app.command()
def resume(
    pool: PoolArgument,
    tenant: PausedTenant = None,
    priority: PausedClass = None,
    background: PausedKind = None,
    redis_url: RedisUrl = None,
) -> None:
    """End a pause that began with the same options. Prints the pauses that are left as JSON.

    Examples:
        penstock pools resume POOL
    """
    _set_pause(redis_url, pool, on=False, tenant=tenant, priority=priority, background=background)


def _set_pause(redis_url: str | None, pool: str, *, on: bool, **given: Any) -> None:
    async def work() -> list[Pause]:
        from penstock.producer.client import AsyncClient

        async with AsyncClient(redis_url_of(redis_url)) as client:
            return await (client.control.pause if on else client.control.resume)(pool, **given)

    left = asyncio.run(work())
    with JsonArray() as array:
        array.add(*(one.as_object() for one in left))
    what = " ".join(f"{name} {value}" for name, value in _shown_kinds(given)) or "all jobs"
    if on:
        write_line(
            f"{pool}: nodes take no job of: {what}. `penstock pools resume` with the same options ends it",
            file=sys.stderr,
        )
    else:
        others = f"; {len(left)} other pauses are left" if left else ""
        write_line(f"{pool}: nodes take jobs of: {what}{others}", file=sys.stderr)


def _shown_kinds(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a pause is limited to, in words."""
    for name, value in given.items():
        if name == "background" and value is not None:
            yield "kind", "background" if value else "foreground"
        elif value is not None:
            yield "class" if name == "priority" else name, str(value)


@app.command()
def declare(
    pool: Annotated[str, typer.Argument(help="Name of the pool.")],
    model: Annotated[str | None, typer.Option(help="Name of the model for callers, beside the pool's.")] = None,
    alias: Annotated[list[str] | None, typer.Option(help="Further name of the model; may be repeated.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Longest context in tokens. Without it, only nodes refuse more.")
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Make a pool before its first node, so that jobs may wait for one and metrics show them.

    The pool's limits and parsers come from the same PENSTOCK_NODE_* variables as a node's. A pool that exists stays as
    it is.

    Examples:
        penstock pools declare POOL
        penstock pools declare POOL --model acme/model --max-model-len 8192
    """
    is_new = asyncio.run(_declare(redis_url_of(redis_url), pool, model, tuple(alias or ()), max_model_len))
    write_line(f"{pool}: {'declared' if is_new else 'exists already, and stays as it is'}")


@app.command()
def forget(
    pool: Annotated[str, typer.Argument(help="Name of the pool as printed by `list`.")], redis_url: RedisUrl = None
) -> None:
    """Remove a pool without nodes and open jobs. Its dead letters are deleted; results stay until they expire.

    Examples:
        penstock pools forget POOL
    """
    asyncio.run(_forget(redis_url_of(redis_url, pool=pool), pool))
    write_line(f"{pool} is forgotten")


@app.command()
def allow(
    pool: Annotated[str, typer.Argument(help="Name of the pool.")],
    names: Annotated[list[str] | None, typer.Argument(help="Names that it may serve beside its own.")] = None,
    all_names: Annotated[bool, typer.Option("--all", help="Allow every name that its nodes announce.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """List a pool whose nodes may not do so themselves, and set the models, aliases and adapters that it may serve.

    Only nodes whose user of Redis is confined to their pool need that.

    Examples:
        penstock pools allow POOL
        penstock pools allow POOL acme/model fast-model
    """
    asyncio.run(_allow(redis_url_of(redis_url, pool=pool), pool, None if all_names else names or []))
    beside = "every name" if all_names else ", ".join(names or ()) or "no other name"
    write_line(f"{pool} is listed, and may serve {beside} beside its own")


@app.command()
def repair(redis_url: RedisUrl = None) -> None:
    """Remove what is not a pool from the list of pools, and mend damaged entries and records of pools.

    Examples:
        penstock pools repair
    """
    for line in asyncio.run(_repair(redis_url_of(redis_url))):
        write_line(line)


def object_of(pool: PoolStats, served: ServedPool | None) -> dict[str, Any]:
    """Return a pool as a JSON object."""
    queue, classes = pool.queue, [priority.label for priority in Priority]

    def by_class(values: Sequence[int]) -> dict[str, dict[str, int]]:
        kinds = {"foreground": values[: len(classes)], "background": values[len(classes) :]}
        return {kind: dict(zip(classes, of_kind, strict=True)) for kind, of_kind in kinds.items()}

    return {
        "pool": pool.pool,
        "open_jobs": pool.num_open,
        "queued_jobs": by_class(queue.queued),
        "oldest_queued_ms": by_class(queue.waiting["queued"].oldest_ms),
        "queued_kv_tokens": by_class(queue.cost),
        "scheduled_jobs": by_class(queue.waiting["scheduled"].count),
        "jobs_awaiting_tokens": by_class(queue.waiting["awaiting_tokens"].count),
        "jobs_awaiting_key": by_class(queue.waiting["awaiting_key"].count),
        "running_jobs": by_class(queue.running),
        "expired_jobs": by_class(queue.expired),
        "backlog_s": dict(zip(("foreground", "background"), queue.backlog_s, strict=True)),
        "paused": [pause.as_object() for pause in pool.pauses],
        "kept_bytes": dict(pool.kept),
        "events": dict(pool.counts),
        "nodes": [asdict(node) for node in pool.nodes],
        "without_node_ms": 0 if served is None else served.without_node_ms,
    }


def line_of(pool: PoolStats, served: ServedPool | None) -> str:
    """Return the line of a pool in `penstock pools list`."""
    num_queued, num_nodes = sum(pool.queue.queued), len(pool.nodes)
    parts = [pool.pool, f"{num_nodes} node{'' if num_nodes == 1 else 's'}"]
    if served is not None and served.hours_without_node:
        parts[-1] += f" for {served.hours_without_node} h"
    parts.append(f"{pool.num_open} open jobs, {num_queued} of them queued")
    if oldest_ms := max(pool.queue.waiting["queued"].oldest_ms):
        parts[-1] += f" for up to {oldest_ms / 1e3:.1f} s"
    if num_scheduled := sum(pool.queue.waiting["scheduled"].count):
        parts[-1] += f", {num_scheduled} scheduled"
    if pool.pauses:
        parts.append(f"paused: {', '.join(pause.words for pause in pool.pauses)}")
    if total := sum(node.kv_blocks_total for node in pool.nodes):
        used = total - sum(node.kv_blocks_free for node in pool.nodes)
        parts.append(f"KV cache {used / total:.0%} used")
        parts.append(f"{sum(node.decode_tokens_per_s for node in pool.nodes):.0f} tokens/s")
    if sum(pool.kept.values()) >= _SHOWN_BYTES:
        largest = max(pool.kept, key=lambda tenant: pool.kept[tenant])
        kept_mib, largest_mib = sum(pool.kept.values()) / _MIB, pool.kept[largest] / _MIB
        parts.append(f"{kept_mib:.1f} MiB kept, most by {largest} ({largest_mib:.1f})")
    return "  ".join(parts)


async def _stats(redis_url: str) -> tuple[list[PoolStats], dict[str, ServedPool]]:
    if pool_urls():
        from penstock.producer.client import AsyncClient

        async with AsyncClient(redis_url) as client:
            return (await client.pool_stats())[0], await client.pools()
    from penstock.queue.broker.connection import connect
    from penstock.queue.broker.pools import StatsBroker
    from penstock.queue.broker.producer import ProducerBroker

    async with connect(redis_url) as redis:
        return await StatsBroker(redis).all(), await ProducerBroker(redis).pools()


async def _allow(redis_url: str, pool: str, names: list[str] | None) -> None:
    from penstock.queue.broker.admin import AdminBroker
    from penstock.queue.broker.connection import connect

    async with connect(redis_url) as redis:
        await AdminBroker(redis).allow(pool, names)


async def _declare(
    redis_url: str, pool: str, model: str | None, aliases: tuple[str, ...], max_model_len: int | None
) -> bool:
    from penstock.contract.pool import PoolRecord
    from penstock.contract.tasks import DECODER_KINDS
    from penstock.gpu_node.settings import NodeSettings
    from penstock.queue.broker.admin import AdminBroker
    from penstock.queue.broker.connection import connect

    settings = NodeSettings.load(model=model or pool, pool=pool, redis_url=redis_url, aliases=aliases)
    record = PoolRecord(
        pool=settings.pool_name,
        model=settings.model,
        aliases=settings.aliases,
        max_model_len=max_model_len or 0,
        created_s=int(time.time()),
        tool_format=BY_NAME[settings.tool_parser or "none"],
        reasoning_parser=settings.reasoning_parser or "none",
        kinds=DECODER_KINDS,
    )
    async with connect(redis_url) as redis:
        limit = {} if max_model_len is None else {"max_model_len": max_model_len}
        return await AdminBroker(redis).declare(record, settings.pool_config | limit)


async def _repair(redis_url: str) -> list[str]:
    from penstock.queue.broker.admin import AdminBroker
    from penstock.queue.broker.connection import connect

    async with connect(redis_url) as redis:
        return await AdminBroker(redis).repair()


async def _forget(redis_url: str, pool: str) -> None:
    from penstock.queue.broker.admin import AdminBroker
    from penstock.queue.broker.connection import connect

    async with connect(redis_url) as redis:
        await AdminBroker(redis).forget(pool)
