"""The audit of stored contents: the objects of the storage against the records in Redis."""

from __future__ import annotations

import time
from collections.abc import Iterator

from redis.asyncio import Redis

from penstock.producer.files.service import ORPHAN_AGE_S, Files
from penstock.producer.files.settings import FilesSettings
from penstock.producer.files.storage import PARTIAL, Listed
from penstock.queue.broker.audit import Finding
from penstock.queue.files.file_records import FileRecords, is_file_id, object_of
from penstock.queue.files.records_audit import Contents, contents_of

_KEY = "storage"


async def audit_storage(
    redis: Redis, settings: FilesSettings, *, repair: bool
) -> tuple[list[Finding], list[Finding]] | None:
    """Return all differences, and those that a repair has left; None if Redis knows no storage.

    Without a repair both are the same.

    A repair deletes objects without a record that are older than an hour, and marks files whose content is gone.
    Younger objects are no findings, because a record of them may be about to be written. Raises UnavailableError.
    """
    files = Files(settings, FileRecords(redis))
    try:
        return await _audit(redis, files, repair=repair) if await files.records.storage_id() else None
    finally:
        files.close()


async def _audit(redis: Redis, files: Files, *, repair: bool) -> tuple[list[Finding], list[Finding]]:
    found = await _findings(redis, files)
    if not repair or not found:
        return found, found
    storage = await files.storage()
    for finding in found:
        if finding.name == "stray":
            await files.on_thread(storage.delete, finding.subject)
    lost = [finding.subject for finding in found if finding.name == "missing"]
    await files.records.mark_lost([name.rpartition("/")[2] for name in lost if name.startswith("files/")])
    return found, await _findings(redis, files)


async def _findings(redis: Redis, files: Files) -> list[Finding]:
    storage = await files.storage()
    # Records first: an object is there before its record. So only an end between the two looks can mislead.
    wanted = await contents_of(redis)
    objects = await files.on_thread(storage.listing, "files")
    parts = await files.on_thread(storage.listing, "parts")
    differing = [*_differing(wanted, objects, parts)]
    if differing:
        still = await contents_of(redis)
        there = still.files.keys() | still.parts.keys()
        differing = [one for one in differing if one.subject in there]
    return sorted([*differing, *await _strays(redis, files, objects, parts)])


def _differing(wanted: Contents, objects: dict[str, Listed], parts: dict[str, Listed]) -> Iterator[Finding]:
    for name, num_bytes in {**wanted.files, **wanted.parts}.items():
        folder, _, rest = name.partition("/")
        found = (objects if folder == "files" else parts).get(rest)
        if found is None:
            yield Finding("missing", _KEY, name, "the storage has no content of this name")
        elif found.num_bytes != num_bytes:
            yield Finding("wrong_size", _KEY, name, f"{found.num_bytes} bytes instead of {num_bytes}")


async def _strays(redis: Redis, files: Files, objects: dict[str, Listed], parts: dict[str, Listed]) -> list[Finding]:
    before_s = time.time() - ORPHAN_AGE_S
    old = [name for name, one in objects.items() if one.modified_s < before_s]
    ids = sorted({name.removesuffix(PARTIAL) for name in old})
    unknown = await files.records.unknown([one for one in ids if is_file_id(one)])
    # Uncommitted parts of an open batch go with it.
    newest_s: dict[str, float] = {}
    for name, one in parts.items():
        batch_id = name.partition("/")[0]
        newest_s[batch_id] = max(one.modified_s, newest_s.get(batch_id, 0.0))
    open_batches = (await contents_of(redis)).open_batches
    ended = [name for name, at_s in newest_s.items() if name not in open_batches and at_s < before_s]
    strays = [object_of(one) for one in unknown] + [f"parts/{one}/" for one in ended]
    return [Finding("stray", _KEY, name, "no record of it") for name in strays]
