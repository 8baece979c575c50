"""`penstock audit`: check that all keys in Redis match the records of jobs, stored files and batches."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import RedisUrl
from penstock.cli.output import AsJson, JsonArray, write_line
from penstock.contract.errors import ConfigError, UnavailableError
from penstock.runtime.cache_folders import state_folder
from penstock.runtime.settings import redis_url_of, redis_urls_of, without_password

if TYPE_CHECKING:
    from penstock.producer.files.storage import FilesSettings
    from penstock.queue.broker.audit import Finding


EXIT_FOUND = 1
FILES = "stored files"
"""What stands for the pool in the findings of stored files and batches."""
CONTENTS = "stored contents"
"""The same for the objects of the storage."""


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """The findings of one pool, or of stored files and batches."""

    pool: str
    found: list[Finding]
    left: list[Finding]
    """The findings that a repair did not correct. Without a repair, all findings."""


def audit(
    pool: Annotated[
        list[str] | None, typer.Option(help="Pool to check. Repeat it for several. Default: all pools.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Repair the findings. Nodes and gateways may keep running.")
    ] = False,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Recompute every set, index and sum in Redis from the jobs, stored files and batches.

    The contents of stored files are compared with their records, where PENSTOCK_FILES_URL (by default the folder of
    `penstock serve`) shows them. A repair deletes contents without a record that are older than an hour, and marks
    files whose content is gone. What a repair cannot restore is in docs/CLI.md. Exit code 1 if any finding remains.

    Where PENSTOCK_POOLS names several Redis, each is checked, or those of the given pools. With --redis-url,
    only that Redis is checked.

    Examples:
        penstock audit
        penstock audit --pool POOL --repair
    """
    show = _show_as_json if as_json else _show
    places: dict[str, list[str] | None] = dict.fromkeys(redis_urls_of(redis_url))
    if pool:
        places = {}
        for name in pool:
            url = redis_url_of(redis_url, pool=name)
            places[url] = [*(places.get(url) or ()), name]
    if asyncio.run(show(places, repair=repair)):
        raise typer.Exit(EXIT_FOUND)


async def audit_pools(
    redis_url: str, pools: list[str] | None, *, repair: bool = False
) -> AsyncGenerator[PoolAudit, None]:
    """Yield the findings of each of these pools (None: of all pools)."""
    from penstock.producer.files.service import audit_storage
    from penstock.queue.broker.admin import AdminBroker
    from penstock.queue.broker.audit import audit
    from penstock.queue.broker.connection import connect
    from penstock.queue.files.records_audit import audit_files

    async with connect(redis_url) as redis:
        broker = AdminBroker(redis)
        for pool in pools or await broker.pools():
            found = await audit(broker, pool, repair=repair)
            yield PoolAudit(pool, found, await audit(broker, pool) if found and repair else found)
        if not pools and (found_files := await audit_files(redis, repair=repair)) is not None:
            left = await audit_files(redis) if found_files and repair else found_files
            yield PoolAudit(FILES, found_files, left or [])
            try:
                if (of_contents := await audit_storage(redis, _files_settings(), repair=repair)) is not None:
                    yield PoolAudit(CONTENTS, *of_contents)
            except (ConfigError, UnavailableError) as error:
                write_line(f"{CONTENTS}: not compared: {error.reason}", file=sys.stderr)


def _files_settings() -> FilesSettings:
    """Return the settings of stored files, by default with the folder of `penstock serve`."""
    from penstock.producer.files.storage import FilesSettings

    settings = FilesSettings.load()
    if settings.url is None and (folder := state_folder() / "files").is_dir():
        return settings.model_copy(update={"url": str(folder)})
    return settings


def audit_lines(audited: PoolAudit, *, repair: bool) -> Iterator[str]:
    """Yield the lines for people about one pool."""
    for finding in audited.found:
        yield f"{audited.pool}: {finding}"
    if audited.found and repair:
        yield f"{audited.pool}: repaired"
        for finding in audited.left:
            yield f"{audited.pool}: {finding}"
    if not audited.left:
        matching = {FILES: "all keys match the records", CONTENTS: "all contents match the records"}
        yield f"{audited.pool}: {matching.get(audited.pool, 'all keys match the jobs')}"


async def _audit_all(places: Mapping[str, list[str] | None], *, repair: bool) -> AsyncGenerator[PoolAudit, None]:
    """Yield the findings of pools in each Redis. Raises UnavailableError behind those of the others if one is away."""
    away: UnavailableError | None = None
    for url, pools in places.items():
        try:
            async with aclosing(audit_pools(url, pools, repair=repair)) as found:
                async for audited in found:
                    yield audited
        except UnavailableError as error:
            if len(places) == 1:
                raise
            away = UnavailableError(f"{without_password(url)}: {error.reason}", code=error.code)
    if away is not None:
        raise away


async def _show(places: Mapping[str, list[str] | None], *, repair: bool) -> int:
    """Print the findings, and return how many remain."""
    num_left = 0
    # Closed at an error of the output too, while the loop still runs.
    async with aclosing(_audit_all(places, repair=repair)) as audits:
        async for audited in audits:
            write_line("\n".join(audit_lines(audited, repair=repair)))
            num_left += len(audited.left)
    return num_left


async def _show_as_json(places: Mapping[str, list[str] | None], *, repair: bool) -> int:
    """Print the findings as JSON, and return how many remain."""
    num_left = 0
    async with aclosing(_audit_all(places, repair=repair)) as audits:
        with JsonArray() as array:
            async for audited in audits:
                found, left = ([_object_of(one) for one in findings] for findings in (audited.found, audited.left))
                array.add({"pool": audited.pool, "found": found, "left": left})
                num_left += len(left)
    return num_left


def _object_of(finding: Finding) -> dict[str, str]:
    return {"invariant": finding.invariant, **asdict(finding)}
