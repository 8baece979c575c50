"""`penstock pools`: what is served, how much is to do, and pools that are no more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.runtime.settings import redis_url_of

if TYPE_CHECKING:
    from penstock.queue.pool_stats import PoolStats

RedisUrl = Annotated[str | None, typer.Option(help="Redis of the pools; default: $PENSTOCK_REDIS_URL.")]

_MIB = 1 << 20
_SHOWN_BYTES = _MIB // 10
"""What tenants keep is told from here on."""

app = typer.Typer(no_args_is_help=True)


@app.callback()
def pools() -> None:
    """Pools: the nodes that serve one model, and the jobs that wait for them."""


@app.command("list")
def list_pools(redis_url: RedisUrl = None) -> None:
    """Print one line per pool: its nodes, its jobs, how full its KV cache is, tokens a second."""
    for pool in asyncio.run(_figures(redis_url_of(redis_url))):
        print(line_of(pool))


@app.command()
def forget(
    pool: Annotated[str, typer.Argument(help="Its name as `list` prints it.")], redis_url: RedisUrl = None
) -> None:
    """Remove a pool that has neither nodes nor open jobs; results live out their time, dead letters go with it."""
    asyncio.run(_forget(redis_url_of(redis_url), pool))


def line_of(pool: PoolStats) -> str:
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
    if sum(pool.kept.values()) >= _SHOWN_BYTES:
        most = max(pool.kept, key=lambda tenant: pool.kept[tenant])
        parts.append(f"{sum(pool.kept.values()) / _MIB:.1f} MiB kept, most by {most} ({pool.kept[most] / _MIB:.1f})")
    return "  ".join(parts)


async def _figures(redis_url: str) -> list[PoolStats]:
    from penstock.queue.broker.connection import connect
    from penstock.queue.broker.pool_stats import StatsBroker

    async with connect(redis_url) as redis:
        return await StatsBroker(redis).all()


async def _forget(redis_url: str, pool: str) -> None:
    from penstock.queue.broker.admin import AdminBroker
    from penstock.queue.broker.connection import connect

    async with connect(redis_url) as redis:
        await AdminBroker(redis).forget(pool)
