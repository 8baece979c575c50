"""`penstock audit`: check that all keys of the pools in Redis match the records of their jobs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.runtime.settings import redis_url_of

if TYPE_CHECKING:
    from penstock.queue.audit import Finding

EXIT_FOUND = 1


def audit(
    pool: Annotated[
        list[str] | None, typer.Option(help="Pool to check. Repeat it for several. Default: all pools.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair the findings. Nodes and gateways may keep running.")
    ] = False,
    redis_url: Annotated[
        str | None, typer.Option(help="URL of the pools' Redis. Default: $PENSTOCK_REDIS_URL.")
    ] = None,
) -> None:
    """Recompute every set, index and sum in Redis from the jobs. Exit code 1 if any finding remains."""
    left = asyncio.run(audit_pools(redis_url_of(redis_url), pool, repair=repair))
    if left:
        raise typer.Exit(EXIT_FOUND)


async def audit_pools(redis_url: str, pools: list[str] | None, *, repair: bool = False) -> int:
    """Print the findings for these pools (None: all pools), and return how many remain."""
    from penstock.queue.audit import audit
    from penstock.queue.broker.admin import AdminBroker
    from penstock.queue.broker.connection import connect

    redis = connect(redis_url)
    try:
        broker, left = AdminBroker(redis), 0
        for pool in pools or await broker.pools():
            found = await audit(broker, pool, repair=repair)
            _print(pool, found)
            if found and repair:
                print(f"{pool}: repaired")
                found = await audit(broker, pool)
                _print(pool, found)
            left += len(found)
        return left
    finally:
        await redis.aclose()


def _print(pool: str, findings: list[Finding]) -> None:
    for finding in findings:
        print(f"{pool}: {finding}")
    if not findings:
        print(f"{pool}: all keys match the jobs")
