"""`penstock profile`: ask a running node where its time goes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.cli.options import RedisUrl
from penstock.cli.output import write_line
from penstock.contract.errors import NotFoundError, RequestError, UnavailableError
from penstock.runtime.settings import redis_names_of, without_password

if TYPE_CHECKING:
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

    The node may be on another machine; its answer comes through Redis. Where PENSTOCK_POOLS names several Redis, it is
    looked for in each. With --redis-url it is looked for only there. trace.json.gz has the engine's steps and the
    node's Python stacks. operations.json.gz has the operations of torch, if the runner uses torch. That recording ends
    after 50 steps. With Redis users (ops/acl), only the admin may profile.
    """
    found, summary, files = asyncio.run(_profile(redis_names_of(redis_url), node, seconds))
    folder = output or Path(f"penstock-profile-{summary.node_id}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in files]
    for path, data in zip(paths, files.values(), strict=True):
        path.write_bytes(data)
    if as_json:
        facts = {name: getattr(summary, name) for name in ("node_id", "seconds", "steps", "prefill_tokens")}
        facts |= {"decode_tokens": summary.decode_tokens, "part_seconds": dict(summary.part_seconds)}
        facts |= {"pool": found.pool, "redis": without_password(found.url)}
        write_line(json.dumps(facts | {"files": [str(path) for path in paths]}))
        return
    _print_table(summary)
    for path in paths:
        write_line(f"{path}  ({path.stat().st_size / 1e3:.0f} kB; open it in {VIEWERS})")


class FoundNode(NamedTuple):
    """A live node, and where it is."""

    url: str
    pool: str
    node_id: str


async def _profile(
    names: Mapping[str, str], node: str | None, seconds: float
) -> tuple[FoundNode, ProfileSummary, dict[str, bytes]]:
    from penstock.queue.broker.connection import connect
    from penstock.queue.broker.profiles import ProfileBroker

    found = await _node_named(names, node)
    where = f" of pool {found.pool} in {without_password(found.url)}" if len(names) > 1 else ""
    async with connect(found.url) as redis:
        broker = ProfileBroker(redis)
        write_line(f"recording {found.node_id}{where} for {seconds:g} s", file=sys.stderr)
        summary, files = await broker.answer(found.pool, await broker.ask(found.pool, found.node_id, seconds))
    if summary.problem:
        raise RequestError(summary.problem)
    return found, summary, files


async def _node_named(names: Mapping[str, str], name: str | None) -> FoundNode:
    """Return the only live node whose id begins with `name`; None: the only live node.

    `names`: what each Redis is called. One that is away is named, and the node is looked for in the others.
    """
    from penstock.queue.broker.connection import connect
    from penstock.queue.broker.pools import StatsBroker

    found, away = list[FoundNode](), list[str]()
    for url, of_url in names.items():
        try:
            async with connect(url) as redis:
                pools = await StatsBroker(redis).all()
        except UnavailableError as error:
            if len(names) == 1:
                raise
            away.append(f"{of_url}, at {without_password(url)}: {error.reason}")
            continue
        found += [FoundNode(url, pool.pool, one.node_id) for pool in pools for one in pool.nodes]
    found = [one for one in found if one.node_id.startswith(name or "")]
    if len(found) > 1:
        raise RequestError(f"node must be one of these: {', '.join(one.node_id for one in found)}", param="node")
    missing = f"no live node has an id that begins with {name!r}" if name else "no node is alive"
    if not found and away:
        raise UnavailableError(f"{missing} in the Redis that answer; not asked: {'; '.join(away)}", code="redis_away")
    if not found:
        raise NotFoundError(missing, param="node")
    for one in away:
        write_line(f"not asked: {one}", file=sys.stderr)
    return found[0]


def _print_table(summary: ProfileSummary) -> None:
    from rich.table import Table

    from penstock.cli.console import Console

    steps = max(1, summary.steps)
    write_line(f"{summary.node_id}: {summary.steps} steps in {summary.seconds:.1f} s, ", end="")
    write_line(f"{summary.prefill_tokens} prompt tokens, {summary.decode_tokens} output tokens")
    table = Table("part")
    for heading in ("seconds", "share of the time", "ms per step"):
        table.add_column(heading, justify="right")
    parts = sorted(summary.part_seconds.items(), key=lambda part: -part[1])
    for name, part_s in parts:
        table.add_row(name, f"{part_s:.3f}", f"{part_s / summary.seconds:.1%}", f"{1e3 * part_s / steps:.3f}")
    Console().print(table)
