"""Stored files and their records in Redis: uploads, files, limits, and what is to be deleted from the storage."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import uuid_utils
from redis.asyncio import Redis

from penstock.contract.errors import (
    BusyError,
    ConflictError,
    DamagedRecordError,
    InvariantError,
    NotFoundError,
    PenstockError,
    RequestError,
    TooLargeError,
)
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import Patience, retried, translated
from penstock.queue.broker.pools import LoggedOnce
from penstock.queue.record_fields import RecordFields, is_text, is_wrong_type

_LOG = logging.getLogger(__package__)
BATCH = "batch"
BATCH_OUTPUT = "batch_output"
PURPOSES = ("assistants", BATCH, "evals", "fine-tune", "user_data", "vision")
"""Purposes of uploads. Only a file of the purpose `batch` can be the input of a batch."""
MESSAGE_BATCH, MESSAGE_RESULTS = "message_batch", "message_batch_results"
"""Purposes of the input and of the results of a message batch. `/v1/files` does not show such files."""
OF_MESSAGE_BATCHES = frozenset((MESSAGE_BATCH, MESSAGE_RESULTS))
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
MAX_NAME_CHARS = 255
MAX_LIFE_S = 10 * 365 * 86_400
"""The longest life that a caller may give a file."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that is whole and kept."""

    file_id: str
    tenant: str
    name: str
    purpose: str
    num_bytes: int
    created_ms: int
    expires_ms: int | None
    is_lost: bool = False
    """Whether an audit has found that the storage lost its content."""

    @property
    def object_name(self) -> str:
        """The name of its content in the storage."""
        return object_of(self.file_id)


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is to be kept, with the life that its owner wants; 0: no end."""

    file_id: str
    name: str
    purpose: str
    num_bytes: int
    life_ms: int


def new_file_id() -> str:
    """Return the id of a new file. Ids sort by the time when they were made."""
    return f"file-{uuid_utils.uuid7().hex}"


def is_file_id(text: str) -> bool:
    """Return whether `text` has the form of a file's id."""
    return _FILE_ID.fullmatch(text) is not None


def object_of(file_id: str) -> str:
    """Return the name of a file's content in the storage."""
    return f"files/{file_id}"


UPLOAD_LEASE_MS = 600_000
"""Milliseconds after which an upload that its gateway no longer renews is dropped."""
_RETRY_MS = 60_000
_ERASED_AT_ONCE = 200
_FIELDS = ("tenant", "name", "purpose", "bytes", "created", "expires", "lost")


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of stored files. 0: none."""

    max_tenant_bytes: int = 0
    max_bytes: int = 0
    max_tenant_files: int = 0
    max_files: int = 0


class HeldFiles(NamedTuple):
    """What a tenant has."""

    num_batches: int
    num_files: int
    num_bytes: int


NO_LIMITS = FileLimits()
_SETTING_OF = {
    "max_tenant_bytes": "bytes of the files of one tenant (PENSTOCK_FILES_MAX_TENANT_MIB)",
    "max_bytes": "bytes of all files (PENSTOCK_FILES_MAX_MIB)",
    "max_tenant_files": "files of one tenant (PENSTOCK_FILES_MAX_TENANT_FILES)",
    "max_files": "files of all tenants (PENSTOCK_FILES_MAX_FILES)",
}


def check(answer: Sequence[Any], refusals: Mapping[bytes, PenstockError]) -> None:
    """Raise the error of the refusal that the first part of a script's answer names, if it names one."""
    if (error := refusals.get(answer[0])) is not None:
        raise error


async def call_script(redis: Redis, what: str, **arguments: Any) -> list[Any]:
    """Do one thing by files.lua and return its answer. Keys of another type are deleted if they refuse it."""
    given = scripts.packed(arguments)
    try:
        answer: list[Any] = await scripts.call(redis, "files", keys.FILES, what, given)
    except InvariantError as error:
        if "WRONGTYPE" not in error.detail:
            raise
        tenant = scripts.packed({"tenant": arguments.get("tenant")})
        _, names = await scripts.call(redis, "files", keys.FILES, "mend", tenant)
        if not names:
            raise DamagedRecordError(f"a record that `{what}` needs is damaged: {error.message}") from error
        _LOG.warning("deleted keys of another type", extra={"keys": [name.decode() for name in names]})
        answer = await scripts.call(redis, "files", keys.FILES, what, given)
    return answer


def no_file(file_id: str, param: str = "file_id") -> NotFoundError:
    """Return the error for a file that the tenant does not have."""
    return NotFoundError(f"no file {file_id[:64]!r}", code="file_not_found", param=param)


class FileRecords:
    """The records of stored files. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis, self._logged = cast(Any, redis), LoggedOnce(_LOG)

    @retried
    async def storage_id(self, new: str = "") -> str:
        """Return the id of the storage in use: `new` if there is none yet. Empty: there is none."""
        return cast(str, (await call_script(self._redis, "storage", id=new))[1].decode())

    @retried
    async def begin_upload(self, file_id: str, tenant: str, num_bytes: int, limits: FileLimits = NO_LIMITS) -> None:
        """Take the bytes of an upload out of the limits.

        Raises TooLargeError if one file alone exceeds the limit, and BusyError if it does so beside others.
        """
        asked = {name: getattr(limits, name) for name in _SETTING_OF}
        answer = await call_script(
            self._redis, "upload", id=file_id, tenant=tenant, bytes=num_bytes, lease_ms=UPLOAD_LEASE_MS, **asked
        )
        if answer[0] != b"OK":
            limit, name = int(answer[2]), answer[1].decode()
            message = f"the file exceeds the limit of {limit} {_SETTING_OF[name]}"
            if name.endswith("_bytes") and num_bytes > limit:
                raise TooLargeError(message, code="file_storage_full", param="file")
            message += "; delete files, or wait until some expire"
            raise BusyError(message, code="file_storage_full", retry_after_ms=_RETRY_MS)

    @retried
    async def keep_upload(self, file_id: str) -> bool:
        """Renew an upload. Return whether it still counts."""
        answer = await call_script(self._redis, "keep_upload", id=file_id, lease_ms=UPLOAD_LEASE_MS)
        return bool(answer[0] == b"OK")

    @retried
    async def end_upload(self, file_id: str) -> None:
        """Drop an upload; its object is garbage then."""
        await call_script(self._redis, "end_upload", id=file_id)

    @retried
    async def save(self, file: NewFile, tenant: str, *, idempotency_key: str | None = None, digest: str = "") -> str:
        """Turn an upload into a file and return its id: that of the file that was saved before with the same key.

        Raises ConflictError if the key belongs to another content, and RequestError if the upload took too long.
        """
        answer = await call_script(
            self._redis,
            "save",
            file=file_arguments(file),
            tenant=tenant,
            idem=keys.key_hash(idempotency_key),
            digest=digest,
        )
        if answer[0] == b"CONFLICT":
            raise key_conflict(f"file {answer[1].decode()}")
        if answer[0] != b"OK":
            raise upload_dropped()
        return cast(str, answer[1].decode())

    @retried
    async def delete(self, file_id: str, tenant: str) -> None:
        """Drop a file. Raises NotFoundError, and ConflictError while an open batch reads it."""
        message = f"file {file_id} is the input of an open batch; cancel the batch or wait for its end"
        in_use = ConflictError(message, code="file_in_use", param="file_id")
        refusals = {b"NOT_FOUND": no_file(file_id), b"IN_USE": in_use}
        check(await call_script(self._redis, "delete", id=file_id, tenant=tenant), refusals)

    @retried
    async def find(self, file_id: str, tenant: str) -> StoredFile:
        """Return a file of a tenant. Raises NotFoundError, and DamagedRecordError."""
        with translated():
            found = await self._redis.hgetall(keys.stored_file(file_id))
        file = _file_of(file_id, found, tenant)
        if file is None or file.tenant != tenant:
            raise no_file(file_id)
        return file

    @retried
    async def ids(self, tenant: str, *, newest_first: bool) -> list[str]:
        """Return the ids of a tenant's files in the order in which they were saved."""
        with translated():
            found = await self._redis.zrange(keys.files_of(tenant), 0, -1)
        return [one.decode() for one in (reversed(found) if newest_first else found) if is_text(one)]

    @retried
    async def several(self, file_ids: Sequence[str], tenant: str) -> list[StoredFile]:
        """Return those of a tenant's files that there still are. A damaged record is logged, and hides its file."""
        commands = [("HMGET", keys.stored_file(file_id), *_FIELDS) for file_id in file_ids]
        with translated():
            rows = await scripts.call_all(self._redis, commands)
        files = []
        for file_id, row in zip(file_ids, rows, strict=True):
            if isinstance(row, Exception) and not is_wrong_type(row):
                raise row
            values = () if isinstance(row, Exception) else zip(_FIELDS, row, strict=True)
            try:
                file = _file_of(file_id, {name.encode(): one for name, one in values if one is not None}, tenant)
            except DamagedRecordError as error:
                self._logged.warn("unreadable file record", keys.stored_file(file_id), error.message)
                continue
            if file is not None and file.tenant == tenant:
                files.append(file)
        return files

    @retried
    async def expire(self, limit: int) -> tuple[int, list[str]]:
        """Drop up to `limit` expired records. Return their number, and objects of the storage that are garbage."""
        answer = await call_script(self._redis, "expire", limit=limit)
        return int(answer[1]), [one.decode() for one in answer[2]]

    async def held_by(self, tenant: str) -> HeldFiles:
        """Return how many batches, files and bytes a tenant has."""
        return HeldFiles(*map(int, (await call_script(self._redis, "erase", tenant=tenant, limit=0))[1:]))

    async def erase(self, tenant: str) -> None:
        """Drop all batches, files and uploads of a tenant. Gateways delete the contents then."""
        left = await self.held_by(tenant)
        while left.num_batches or left.num_files:
            await call_script(self._redis, "erase", tenant=tenant, limit=_ERASED_AT_ONCE)
            left = await self.held_by(tenant)
        with translated():
            names = f"{keys.prefix(keys.FILES)}:idem:{tenant}:".replace("{", "\\{")
            async for name in self._redis.scan_iter(match=f"{names}*", count=1000):
                await self._redis.delete(name)

    @retried
    async def forget(self, objects: Sequence[str]) -> None:
        """Note that these objects are deleted."""
        await call_script(self._redis, "forget", objects=list(objects))

    @retried
    async def unknown(self, file_ids: Sequence[str]) -> list[str]:
        """Return those of these ids that no record names."""
        return [one.decode() for one in (await call_script(self._redis, "unknown", ids=list(file_ids)))[1]]

    async def mark_lost(self, file_ids: Sequence[str]) -> None:
        """Note that the storage has lost the contents of these files."""
        await call_script(self._redis, "lose", ids=list(file_ids))


def file_arguments(file: NewFile) -> dict[str, Any]:
    """Return a new file as files.lua takes it."""
    return {
        "id": file.file_id,
        "name": file.name,
        "purpose": file.purpose,
        "bytes": file.num_bytes,
        "life_ms": file.life_ms,
    }


def upload_dropped() -> RequestError:
    """Return the error for an upload whose lease ended before it was whole."""
    return RequestError("the upload was dropped, because it stood still too long", code="upload_dropped")


def key_conflict(made: str) -> ConflictError:
    """Return the error for an idempotency key of another request. `made`: what that request made."""
    message = f"Idempotency-Key belongs to {made}, which was made by another request; use a new key"
    return ConflictError(message, code="idempotency_conflict", param="idempotency-key")


def _file_of(file_id: str, found: Mapping[bytes, bytes], tenant: str) -> StoredFile | None:
    """Return a file, None for none of the tenant's. Raises DamagedRecordError."""
    if found.get(b"tenant") != tenant.encode():
        return None
    fields = RecordFields(f"file {file_id}", found)
    return StoredFile(
        file_id,
        tenant,
        fields.text("name"),
        fields.one_of("purpose", (*PURPOSES, BATCH_OUTPUT, *OF_MESSAGE_BATCHES)),
        fields.whole("bytes"),
        fields.time_ms("created"),
        None if fields.text("expires") == "" else fields.time_ms("expires"),
        is_lost=fields.text("lost", "") == "1",
    )
