"""The service of stored files, over storage and records: uploads, contents, removal of what has expired, and audit."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from typing import ParamSpec, Self, TypeVar

from redis.asyncio import Redis

from penstock.contract.errors import BusyError, NotFoundError, PenstockError, TooLargeError, UnavailableError
from penstock.producer.files.storage import (
    BLOCK_BYTES,
    PARTIAL,
    FilesSettings,
    Listed,
    ObjectWriter,
    Storage,
    storage_errors,
)
from penstock.queue.broker.audit import Finding
from penstock.queue.files.file_records import (
    FileRecords,
    NewFile,
    StoredFile,
    is_file_id,
    new_file_id,
    no_file,
    object_of,
)
from penstock.queue.files.records_audit import Contents, contents_of

_LOG = logging.getLogger(__package__)
NUM_THREADS = 8
"""Threads that read and write. A storage that hangs holds up nothing else of its process."""
CHECK_S = 10.0
"""Seconds for which a storage counts as the right one after it was checked."""
RENEW_S = 60.0
CLEAN_S = 30.0
"""Seconds between two looks for expired files."""
ORPHAN_CHECK_S = 3600.0
ORPHAN_AGE_S = 3600.0
"""Age of an object without a record at which it is deleted: nothing may be about to record it any more."""
_CLEANED_AT_ONCE = 500
_CONTENT_BYTES = 256 << 10

P = ParamSpec("P")
T = TypeVar("T")


def without_storage() -> UnavailableError:
    """Return the error of a process that has no storage."""
    message = "files are not stored here: set PENSTOCK_FILES_URL to a folder, or to a URL such as s3://bucket/penstock"
    return UnavailableError(message, code="no_file_storage", retry_after_ms=60_000)


class Files:
    """The stored files of an installation, as one process sees them."""

    def __init__(self, settings: FilesSettings, records: FileRecords) -> None:
        self.settings = settings
        self.records = records
        self._storage: Storage | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, "penstock-files")
        self._checked_s = -CHECK_S
        self._checking = asyncio.Lock()

    def close(self) -> None:
        """End the threads once they have done what they do now."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def on_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that blocks on the storage."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*args, **kwargs))

    async def storage(self) -> Storage:
        """Return the storage. Raises UnavailableError unless it is the one that Redis's files are in."""
        clock = asyncio.get_running_loop().time
        async with self._checking:
            if self._storage is None:
                if self.settings.url is None:
                    raise without_storage()
                self._storage = await self.on_thread(Storage, self.settings.url)
            if clock() - self._checked_s > CHECK_S:
                await self._check(self._storage)
                self._checked_s = clock()
            return self._storage

    async def _check(self, storage: Storage) -> None:
        storage_id = await self.records.storage_id()
        if not storage_id:
            made = await self.on_thread(storage.create)
            storage_id = await self.records.storage_id(made)
            if storage_id != made:
                # Another process was first. Only its mark says whether this one sees the same storage.
                await self.on_thread(storage.delete, "/")
        await self.on_thread(storage.choose, storage_id)

    async def begin(self, tenant: str, num_bytes: int, *, limited: bool = True) -> Upload:
        """Begin a file of at most `num_bytes`. `limited`: it counts against the limits, and needs free space.

        Raises TooLargeError, BusyError for a limit, and UnavailableError.
        """
        storage, file_id = await self.storage(), new_file_id()
        if not limited:
            await self.records.begin_upload(file_id, tenant, num_bytes)
        else:
            floor = self.settings.min_free_mib << 20
            free = await self.on_thread(storage.free_bytes)
            if free is not None and free - num_bytes < floor:
                message = (
                    f"the disk of stored files has {free >> 20} MiB free, and {self.settings.min_free_mib} MiB of them "
                    "must stay free (PENSTOCK_FILES_MIN_FREE_MIB)"
                )
                raise BusyError(message, code="file_storage_full", retry_after_ms=60_000)
            await self.records.begin_upload(file_id, tenant, num_bytes, self.settings.limits)
        try:
            writer = await self.on_thread(storage.writer, object_of(file_id))
        except BaseException:
            await asyncio.shield(self.records.end_upload(file_id))
            raise
        return Upload(self, storage, writer, file_id, tenant, num_bytes)

    async def find(self, file_id: str, tenant: str) -> StoredFile:
        """Return a file of a tenant. Raises NotFoundError, also if the process has no storage."""
        if not is_file_id(file_id):
            raise no_file(file_id)
        return await self.records.find(file_id, tenant)

    async def delete(self, file: StoredFile) -> None:
        """Delete a file. Raises NotFoundError, and ConflictError while an open batch reads it."""
        await self.records.delete(file.file_id, file.tenant)
        await self.delete_garbage(file.object_name)

    async def delete_garbage(self, *names: str) -> None:
        """Delete objects that Redis lists as garbage. While the storage is away, they stay listed."""
        with suppress(PenstockError):
            storage = await self.storage()
            for name in names:
                await self.on_thread(storage.delete, name)
            await self.records.forget(names)

    async def content(self, file: StoredFile, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a file from `start` to before `end`. Raises NotFoundError if the storage lacks it."""
        try:
            async with aclosing(self.object_content(file.object_name, start, end)) as blocks:
                async for block in blocks:
                    yield block
        except NotFoundError:
            # Deleted meanwhile, or lost by the storage.
            raise no_file(file.file_id) from None

    async def object_content(self, name: str, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of an object from `start` to before `end`. Raises NotFoundError if the storage lacks it."""
        storage = await self.storage()
        source = await self.on_thread(storage.reader, name)

        def read(at: int) -> bytes:
            with storage_errors():
                source.seek(at)
                return source.read(min(_CONTENT_BYTES, end - at))

        try:
            while start < end and (block := await self.on_thread(read, start)):
                yield block
                start += len(block)
        finally:
            with suppress(RuntimeError):
                self._threads.submit(source.close)

    async def keep_clean(self) -> None:
        """Delete expired files until cancelled. Any number of processes may do so at once."""
        clock = asyncio.get_running_loop().time
        next_orphans_s = clock()
        while True:
            try:
                if self.settings.url is not None:
                    await self.clean()
                    if clock() >= next_orphans_s:
                        await self.delete_orphans()
                        next_orphans_s = clock() + ORPHAN_CHECK_S
            except UnavailableError as error:
                _LOG.info("expired files wait until they can be deleted", extra={"reason": error.reason})
            except PenstockError as error:
                _LOG.warning("expired files cannot be deleted", extra={"reason": error.reason, "code": error.code})
            except Exception:
                # A defect, or records that nothing of ours has written. The next look goes on with the others.
                _LOG.exception("a look for expired files failed")
            await asyncio.sleep(CLEAN_S)

    async def clean(self) -> None:
        """Delete files and batches that have expired, uploads that ended without a word, and garbage."""
        storage = await self.storage()
        while True:
            num_expired, garbage = await self.records.expire(_CLEANED_AT_ONCE)
            for name in garbage:
                await self.on_thread(storage.delete, name)
            await self.records.forget(garbage)
            if num_expired < _CLEANED_AT_ONCE and len(garbage) < _CLEANED_AT_ONCE:
                return

    async def delete_orphans(self) -> int:
        """Delete objects of files that no record names, such as those of an earlier Redis. Return their number."""
        storage = await self.storage()
        names = await self.on_thread(storage.older_names, "files", ORPHAN_AGE_S)
        num_deleted = 0
        for at in range(0, len(names), _CLEANED_AT_ONCE):
            part = [name for name in names[at : at + _CLEANED_AT_ONCE] if is_file_id(name)]
            for file_id in await self.records.unknown(part):
                await self.on_thread(storage.delete, object_of(file_id))
                num_deleted += 1
        if num_deleted:
            _LOG.warning("deleted stored objects that no record names", extra={"num_objects": num_deleted})
        return num_deleted


class Upload:
    """A file while it arrives. `save` keeps it; otherwise the end of its `async with` block drops it."""

    def __init__(
        self, files: Files, storage: Storage, writer: ObjectWriter, file_id: str, tenant: str, max_bytes: int
    ) -> None:
        self.file_id = file_id
        self.num_bytes = 0
        self._files = files
        self._storage = storage
        self._writer = writer
        self._tenant = tenant
        self._max_bytes = max_bytes
        self._digest = hashlib.sha256()
        self._buffer = bytearray()
        self._renewed_s = asyncio.get_running_loop().time()
        self._is_over = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._is_over:
            # Not dropped here, it would be by any gateway once its lease ends.
            with suppress(PenstockError):
                await asyncio.shield(self._drop())

    async def _drop(self) -> None:
        self._is_over = True
        try:
            await self._files.on_thread(self._writer.discard)
        finally:
            await self._files.records.end_upload(self.file_id)
            await self._files.delete_garbage(object_of(self.file_id))

    async def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises TooLargeError beyond the size that was announced."""
        self._buffer += data
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise TooLargeError(f"the file is larger than {self._max_bytes} bytes", code="file_too_large", param="file")
        if len(self._buffer) >= BLOCK_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        block, self._buffer = bytes(self._buffer), bytearray()

        def store() -> None:
            self._digest.update(block)
            self._writer.write(block)

        await self._files.on_thread(store)
        now_s = asyncio.get_running_loop().time()
        if now_s - self._renewed_s > RENEW_S:
            await self._files.records.keep_upload(self.file_id)
            self._renewed_s = now_s

    async def append(self, name: str) -> None:
        """Append a whole object of the storage."""
        self.num_bytes += await self._files.on_thread(self._storage.append_to, self._writer, name)

    async def finish(self) -> None:
        """Let the content exist. It is no file before it is saved."""
        await self._flush()
        await self._files.on_thread(self._writer.commit)

    async def save(self, name: str, purpose: str, life_ms: int, *, idempotency_key: str | None = None) -> str:
        """Keep the file, and return its id: that of an equal file if one was saved with this key.

        Raises ConflictError if another file was saved with this key.
        """
        await self.finish()
        file = NewFile(self.file_id, name, purpose, self.num_bytes, life_ms)
        digest = hashlib.sha256(f"{self._digest.hexdigest()} {purpose} {name}".encode()).hexdigest()
        saved = await self._files.records.save(file, self._tenant, idempotency_key=idempotency_key, digest=digest)
        self._is_over = True
        if saved != self.file_id:
            await self._files.delete_garbage(object_of(self.file_id))
        return saved

    @property
    def digest(self) -> str:
        """The digest of a finished file's content."""
        return self._digest.hexdigest()

    def new_file(self, name: str, purpose: str, life_ms: int) -> NewFile:
        """Return the finished file for a script that saves it together with something else, if it succeeds."""
        return NewFile(self.file_id, name, purpose, self.num_bytes, life_ms)

    def saved(self, name: str, purpose: str, life_ms: int) -> NewFile:
        """Return the finished file for a script that saves it whatever happens to this process."""
        self.note_saved()
        return self.new_file(name, purpose, life_ms)

    def note_saved(self) -> None:
        """Note that a script has saved or dropped the file."""
        self._is_over = True


# The audit of stored contents: the objects of the storage against the records in Redis.

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
    old = await files.on_thread(storage.older, objects, ORPHAN_AGE_S)
    old_parts = await files.on_thread(storage.older, parts, ORPHAN_AGE_S)
    changing = {_batch_of(name) for name in parts.keys() - old_parts.keys()}
    return sorted([*differing, *await _strays(redis, files, old, {_batch_of(name) for name in old_parts} - changing)])


def _batch_of(part: str) -> str:
    return part.partition("/")[0]


def _differing(wanted: Contents, objects: dict[str, Listed], parts: dict[str, Listed]) -> Iterator[Finding]:
    for name, num_bytes in {**wanted.files, **wanted.parts}.items():
        folder, _, rest = name.partition("/")
        found = (objects if folder == "files" else parts).get(rest)
        if found is None:
            yield Finding("missing", _KEY, name, "the storage has no content of this name")
        elif found.num_bytes != num_bytes:
            yield Finding("wrong_size", _KEY, name, f"{found.num_bytes} bytes instead of {num_bytes}")


async def _strays(redis: Redis, files: Files, old: Collection[str], parts: Collection[str]) -> list[Finding]:
    """`old`, `parts`: the old objects of files, and the batches whose parts are all old."""
    ids = sorted({name.removesuffix(PARTIAL) for name in old})
    unknown = await files.records.unknown([one for one in ids if is_file_id(one)])
    # Uncommitted parts of an open batch go with it.
    open_batches = (await contents_of(redis)).open_batches
    ended = [name for name in parts if name not in open_batches]
    strays = [object_of(one) for one in unknown] + [f"parts/{one}/" for one in ended]
    return [Finding("stray", _KEY, name, "no record of it") for name in strays]
