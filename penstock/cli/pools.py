"""`penstock pools`: what is served, how much is to do, and pools that are no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from penstock.contract.settings import redis_url_of

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from penstock.contract.figures import PoolFigures

T = TypeVar("T")
RedisUrl = Annotated[str | None, typer.Option(help="Redis of the pools; default: $PENSTOCK_REDIS_URL.")]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def pools() -> None:
    """Pools: the nodes that serve one model, and the jobs that wait for them."""


@app.command("list")
def list_pools(redis_url: RedisUrl = None) -> None:
    """Print one line per pool: its nodes, its jobs, how full its KV cache is, tokens a second."""

    async def find(redis: Redis) -> list[PoolFigures]:
        from penstock.contract.broker.figures import FiguresBroker

        return await FiguresBroker(redis).all()

    for pool in _run(redis_url, find):
        print(line_of(pool))


@app.command()
def forget(
    pool: Annotated[str, typer.Argument(help="Its name as `list` prints it.")], redis_url: RedisUrl = None
) -> None:
    """Remove a pool that has neither nodes nor open jobs; results live out their time, dead letters go with it."""

    async def remove(redis: Redis) -> None:
        from penstock.contract.broker.admin import AdminBroker

        await AdminBroker(redis).forget(pool)

    _run(redis_url, remove)


def line_of(pool: PoolFigures) -> str:
    """A pool at a glance."""
    num_queued, num_nodes = sum(pool.depth), len(pool.nodes)
    parts = [pool.pool, f"{num_nodes} node{'' if num_nodes == 1 else 's'}"]
    parts.append(f"{pool.num_open} open jobs, {num_queued} of them queued")
    if oldest_ms := max(pool.oldest_ms):
        parts[-1] += f" for up to {oldest_ms / 1e3:.1f} s"
    if total := sum(node.kv_blocks_total for node in pool.nodes):
        held = total - sum(node.kv_blocks_free for node in pool.nodes)
        parts.append(f"KV cache {held / total:.0%} held")
        parts.append(f"{sum(node.decode_tokens_per_s for node in pool.nodes):.0f} tokens/s")
    return "  ".join(parts)


def _run(redis_url: str | None, work: Callable[[Redis], Awaitable[T]]) -> T:
    async def run() -> T:
        from penstock.contract.broker.connection import connect

        redis = connect(redis_url_of(redis_url))
        try:
            return await work(redis)
        finally:
            await redis.aclose()

    return asyncio.run(run())
