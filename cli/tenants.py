"""`penstock tenants`: delete all data of a tenant."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.command_line import App
from penstock.cli.options import RedisUrl
from penstock.cli.output import AsJson, confirm, print_object, write_line
from penstock.runtime.settings import pool_urls, redis_url_of

if TYPE_CHECKING:
    from penstock.queue.tenants.deletion import TenantData

app = App()


@app.callback()
def tenants() -> None:
    """Delete all data of a tenant."""


@app.command()
def delete(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant, as `keys list` and `jobs list` show it.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; print what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Delete a tenant's API keys, cancel its jobs and batches, and delete all their data, its files and its usage.

    Gateways delete the contents of its files within a minute. Logs, traces and backups of Redis's files stay. First
    stop what submits for the tenant without an API key.

    Examples:
        penstock tenants delete acme --dry-run
        penstock tenants delete acme --yes
    """
    urls = list(dict.fromkeys((redis_url_of(redis_url), *pool_urls().values())))
    found = asyncio.run(_data(urls, tenant))
    if dry_run or not (yes or as_json):
        print_object(_object_of(found), as_json=as_json)
    if dry_run:
        return
    confirm(f"Delete all of that for tenant {tenant}?", is_sure=yes, can_ask=not as_json)
    num_jobs = asyncio.run(_delete(urls, tenant))
    if as_json:
        print_object({**_object_of(found), "num_deleted_jobs": num_jobs}, as_json=True)
        return
    files, num_endpoints = found.files, found.num_endpoints
    counts = {"API keys": found.num_keys, "jobs": num_jobs, "files": files.num_files, "batches": files.num_batches}
    counts |= {"webhook endpoints": num_endpoints, "schedules": found.num_schedules}
    shown = ", ".join(f"{number} {what}" for what, number in counts.items() if number or what in ("API keys", "jobs"))
    write_line(f"deleted: {shown}", file=sys.stderr)


async def _data(urls: Sequence[str], tenant: str) -> TenantData:
    """Return what the directory has of the tenant, and what the pools of each Redis have."""
    from penstock.queue.broker.connection import connect
    from penstock.queue.tenants.deletion import TenantBroker

    found: list[TenantData] = []
    for url in urls:
        async with connect(url) as redis:
            found.append(await TenantBroker(redis).data(tenant))
    return replace(found[0], pools={pool: held for one in found for pool, held in one.pools.items()})


async def _delete(urls: Sequence[str], tenant: str) -> int:
    """Delete the tenant's data in each Redis, keys and files first. Return the number of jobs that were deleted."""
    from penstock.queue.broker.connection import connect
    from penstock.queue.tenants.deletion import TenantBroker

    num_jobs = list[int]()
    for url in urls:
        async with connect(url) as redis:
            await TenantBroker(redis).delete(tenant, num_jobs.append)
    return sum(num_jobs)


def _object_of(data: TenantData) -> dict[str, Any]:
    files = data.files
    return {
        "object": "tenant",
        "tenant": data.tenant,
        "num_keys": data.num_keys,
        "num_webhook_endpoints": data.num_endpoints,
        "num_schedules": data.num_schedules,
        "pools": {
            pool: {"open_jobs": held.num_open, "ended_jobs": held.num_ended, "bytes": held.num_bytes}
            for pool, held in data.pools.items()
        },
        "files": {"batches": files.num_batches, "files": files.num_files, "bytes": files.num_bytes},
    }
