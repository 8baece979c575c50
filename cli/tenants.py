"""`penstock tenants`: delete all data of a tenant."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.command_line import App
from penstock.cli.options import RedisUrl
from penstock.cli.output import AsJson, print_object
from penstock.contract.errors import ConfigError
from penstock.runtime.settings import redis_url_of

if TYPE_CHECKING:
    from penstock.queue.broker.tenants import TenantData
    from penstock.queue.files.file_records import HeldFiles

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
    url = redis_url_of(redis_url)
    found, files = asyncio.run(_data(url, tenant))
    if dry_run or not (yes or as_json):
        print_object(_object_of(found, files), as_json=as_json)
    if dry_run:
        return
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise ConfigError("add --yes: without a terminal, this command cannot ask before it deletes")
        typer.confirm(f"Delete all of that for tenant {tenant}?", abort=True, err=True)
    num_jobs = asyncio.run(_delete(url, tenant))
    if as_json:
        print_object({**_object_of(found, files), "num_deleted_jobs": num_jobs}, as_json=True)
    else:
        stored = (
            f", {files.num_files} files, {files.num_batches} batches" if files.num_files or files.num_batches else ""
        )
        print(f"deleted: {found.num_keys} API keys, {num_jobs} jobs{stored}", file=sys.stderr)


async def _data(redis_url: str, tenant: str) -> tuple[TenantData, HeldFiles]:
    from penstock.queue.broker.connection import connect
    from penstock.queue.broker.tenants import TenantBroker
    from penstock.queue.files.file_records import FileRecords

    async with connect(redis_url) as redis:
        return await TenantBroker(redis).data(tenant), await FileRecords(redis).held_by(tenant)


async def _delete(redis_url: str, tenant: str) -> int:
    """Delete the tenant's data, and return the number of jobs that were deleted."""
    from penstock.queue.broker.connection import connect
    from penstock.queue.broker.tenants import TenantBroker
    from penstock.queue.files.file_records import FileRecords
    from penstock.queue.webhooks.deliveries import DeliveryQueue
    from penstock.queue.webhooks.endpoints import EndpointStore

    num_jobs = list[int]()
    async with connect(redis_url) as redis:
        # First, so that no batch submits further rows.
        await FileRecords(redis).erase(tenant)
        endpoints = EndpointStore(redis)
        for endpoint in await endpoints.of(tenant):
            await endpoints.delete(endpoint.id, tenant)
        held = await TenantBroker(redis).delete(tenant, num_jobs.append)
        for pool in held.pools:
            await DeliveryQueue(redis).drop_ends(tenant, pool)
    return sum(num_jobs)


def _object_of(data: TenantData, files: HeldFiles) -> dict[str, Any]:
    return {
        "object": "tenant",
        "tenant": data.tenant,
        "num_keys": data.num_keys,
        "pools": {
            pool: {"open_jobs": held.num_open, "ended_jobs": held.num_ended, "bytes": held.num_bytes}
            for pool, held in data.pools.items()
        },
        "files": {"batches": files.num_batches, "files": files.num_files, "bytes": files.num_bytes},
    }
