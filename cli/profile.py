"""`penstock profile`: ask a running node where its time goes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import RedisUrl
from penstock.contract.errors import NotFoundError, RequestError
from penstock.runtime.settings import redis_url_of

if TYPE_CHECKING:
    from penstock.contract.pool import PoolStats
    from penstock.queue.broker.profiles import ProfileSummary


MAX_SECONDS = 60.0
VIEWERS = "https://ui.perfetto.dev or chrome://tracing"


def profile(
    node: Annotated[
        str | None, typer.Argument(help="Id of the node, or the beginning of it. Default: the only node.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=MAX_SECONDS, help="Seconds to record.")] = 5.0,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the traces. Default: penstock-profile-<node id>.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Record a running node for some seconds: print where its steps' time went, and write Chrome traces.

    The node may be on another machine; its answer comes through Redis. trace.json.gz has the engine's steps and the
    node's Python stacks. operations.json.gz has the operations of torch, if the runner uses torch. That recording ends
    after 50 steps. With Redis users (ops/acl), only the admin may profile.
    """
    summary, files = asyncio.run(_profile(redis_url_of(redis_url), node, seconds))
    folder = output or Path(f"penstock-profile-{summary.node_id}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in files]
    for path, data in zip(paths, files.values(), strict=True):
        path.write_bytes(data)
    if as_json:
        facts = {name: getattr(summary, name) for name in ("node_id", "seconds", "steps", "prefill_tokens")}
        facts |= {"decode_tokens": summary.decode_tokens, "part_seconds": dict(summary.part_seconds)}
        print(json.dumps(facts | {"files": [str(path) for path in paths]}))
        return
    _print_table(summary)
    for path in paths:
        print(f"{path}  ({path.stat().st_size / 1e3:.0f} kB; open it in {VIEWERS})")


async def _profile(redis_url: str, node: str | None, seconds: float) -> tuple[ProfileSummary, dict[str, bytes]]:
    from penstock.queue.broker.connection import connect
    from penstock.queue.broker.pools import StatsBroker
    from penstock.queue.broker.profiles import ProfileBroker

    async with connect(redis_url) as redis:
        pool, node_id = node_named(await StatsBroker(redis).all(), node)
        broker = ProfileBroker(redis)
        print(f"recording {node_id} for {seconds:g} s", file=sys.stderr)
        summary, files = await broker.answer(pool, await broker.ask(pool, node_id, seconds))
    if summary.problem:
        raise RequestError(summary.problem)
    return summary, files


def node_named(pools: list[PoolStats], name: str | None) -> tuple[str, str]:
    """Return the pool and the id of the only live node whose id begins with `name`. None: of the only live node."""
    found = [(pool.pool, one.node_id) for pool in pools for one in pool.nodes if one.node_id.startswith(name or "")]
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(node_id for _, node_id in found)
        raise RequestError(f"node must be one of these: {ids}", param="node")
    raise NotFoundError(
        f"no live node has an id that begins with {name!r}" if name else "no node is alive", param="node"
    )


def _print_table(summary: ProfileSummary) -> None:
    from rich.console import Console
    from rich.table import Table

    steps = max(1, summary.steps)
    print(f"{summary.node_id}: {summary.steps} steps in {summary.seconds:.1f} s, ", end="")
    print(f"{summary.prefill_tokens} prompt tokens, {summary.decode_tokens} output tokens")
    table = Table("part")
    for heading in ("seconds", "share of the time", "ms per step"):
        table.add_column(heading, justify="right")
    parts = sorted(summary.part_seconds.items(), key=lambda part: -part[1])
    for name, part_s in parts:
        table.add_row(name, f"{part_s:.3f}", f"{part_s / summary.seconds:.1%}", f"{1e3 * part_s / steps:.3f}")
    Console().print(table)
