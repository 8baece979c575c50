"""`penstock top`: a live view of pools, nodes and tenants."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import RedisUrl
from penstock.cli.top.frame import SortKey
from penstock.contract.errors import NotFoundError
from penstock.runtime.settings import redis_url_of

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.cli.top.reader import FrameReader


def top(
    pool: Annotated[str | None, typer.Option(help="Show this pool alone. Default: all.")] = None,
    sort: Annotated[SortKey, typer.Option(help="Column that orders the nodes.")] = "node",
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between two views.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view as text, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one view as a JSON object, and end.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Show what pools, nodes and tenants do: KV blocks, running and waiting jobs, tokens per second, and takeovers.

    Keys: q quits, s sorts by the next column, p shows the next pool alone. Without a terminal, one view is printed.

    Examples:
        penstock top
        penstock top --json
        penstock top --once --sort kv
    """
    asyncio.run(_top(redis_url_of(redis_url), pool, sort, interval, once=once, as_json=as_json))


async def _top(
    redis_url: str, pool: str | None, sort: SortKey, interval_s: float, *, once: bool, as_json: bool
) -> None:
    from rich.console import Console

    from penstock.cli.top.live import LiveView
    from penstock.cli.top.reader import FrameReader
    from penstock.queue.broker.connection import connect
    from penstock.queue.broker.pools import ActivityBroker
    from penstock.queue.broker.producer import ProducerBroker

    console = Console()
    async with connect(redis_url) as redis:
        reader = FrameReader(ActivityBroker(redis), ProducerBroker(redis), pool=pool)
        if once or as_json or not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
            await _print_once(reader, console, pool, sort, as_json=as_json)
        else:
            await LiveView(reader, console, interval_s, sort).run()


async def _print_once(reader: FrameReader, console: Console, pool: str | None, sort: SortKey, *, as_json: bool) -> None:
    from penstock.cli.top.screen import screen_of

    frame = await reader.read()
    if pool is not None and not frame.pools:
        raise NotFoundError(f"no pool {pool!r} is announced", code="pool_not_found", param="pool")
    if as_json:
        print(json.dumps(frame.as_json(), ensure_ascii=False))
    else:
        console.print(screen_of(frame, console, sort=sort))
