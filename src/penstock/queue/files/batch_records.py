"""The records of batches in Redis: their states, leases and committed parts."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from penstock.contract.errors import (
    BusyError,
    ConflictError,
    DamagedRecordError,
    InvariantError,
    NotFoundError,
    PenstockError,
    RequestError,
    UnavailableError,
)
from penstock.contract.tenant import ApiKey
from penstock.queue import keys
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import Patience, retried, translated
from penstock.queue.broker.pools import LoggedOnce
from penstock.queue.broker.shared_connection import clock_of
from penstock.queue.files.batch import (
    ENDED_STATES,
    OPEN_STATES,
    TIMES,
    BatchLease,
    BatchRecord,
    BatchSpec,
    Part,
    PartCounts,
    RowProblem,
    is_batch_id,
)
from penstock.queue.files.file_records import (
    NewFile,
    call_script,
    check,
    file_arguments,
    is_file_id,
    key_conflict,
    no_file,
    upload_dropped,
)
from penstock.queue.record_fields import RecordFields, is_text, is_wrong_type, whole

_LOG = logging.getLogger(__package__)
_RETRY_MS = 60_000
_MAX_TOKEN_STEP = 1 << 30


class BatchTakenError(PenstockError):
    """Another process may hold the batch now. Whatever this one still does changes nothing."""

    code = "batch_taken"


def no_batch(batch_id: str) -> NotFoundError:
    """Return the error for a batch that the tenant does not have."""
    return NotFoundError(f"no batch {batch_id[:64]!r}", code="batch_not_found", param="batch_id")


class BatchEnd(NamedTuple):
    """The end of a batch."""

    batch_id: str
    status: str
    tenant: str


class CheckedRows(NamedTuple):
    """The rows of a checked input, and within which limits they become a batch. A limit of 0 does not exist."""

    total: int
    window_ms: int
    max_open: int
    """Most open batches of the tenant."""
    max_rows: int
    """Most rows of its open batches that are not answered."""


class BatchRecords:
    """The records of batches. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis, self._logged = cast(Any, redis), LoggedOnce(_LOG)
        self.made = asyncio.Event()
        """Set when this process makes a batch, so that its holder need not wait for the next look."""

    def now_s(self) -> float:
        """Return the time that the records' times have: that of Redis."""
        return clock_of(self._redis).now_s()

    # For callers.

    @retried
    async def create(
        self,
        batch_id: str,
        tenant: str,
        spec: BatchSpec,
        *,
        window_ms: int,
        max_open: int,
        key: str | None = None,
        terms: ApiKey | None = None,
    ) -> str:
        """Make a batch and return its id: that of the batch that was made before with the same idempotency key.

        `terms`: the API key on whose terms the rows run. Its terms are noted if no release has noted them yet.

        Raises NotFoundError for its file, RequestError for a file of another purpose, BusyError if the tenant has
        `max_open` open batches, and ConflictError for a key of another request.
        """
        request = spec.encoded()
        answer = await call_script(
            self._redis,
            "create",
            id=batch_id,
            tenant=tenant,
            file=spec.input_file_id,
            request=request,
            window_ms=window_ms,
            max_open=max_open,
            # Apart from those of files: a caller may give both the same key.
            idem=keys.key_hash(None if key is None else f"batch {key}"),
            digest=keys.key_hash(request),
            terms="" if terms is None else terms.public_json(),
            key_id=spec.key_id,
        )
        match answer[0]:
            case b"NO_FILE":
                raise no_file(spec.input_file_id, "input_file_id")
            case b"WRONG_PURPOSE":
                message = f"input_file_id: the purpose of the file is {answer[1].decode()}; it must be batch"
                raise RequestError(message, param="input_file_id")
        return self._note_made(answer)

    @retried
    async def create_with_input(
        self,
        batch_id: str,
        spec: BatchSpec,
        upload: NewFile,
        *,
        tenant: str,
        rows: CheckedRows,
        key: str | None = None,
        digest: str = "",
        terms: ApiKey | None = None,
    ) -> str:
        """Make a batch together with its input, an upload whose object is whole and whose rows are checked.

        `terms` as for `create`. Return its id: that of the batch that was made before with the same idempotency key and
        `digest`. If this batch
        is not made, the upload is dropped. Raises BusyError for a limit, ConflictError for a key of another request,
        and RequestError if the upload took too long.
        """
        answer = await call_script(
            self._redis,
            "create_with_input",
            id=batch_id,
            tenant=tenant,
            file=upload.file_id,
            input=file_arguments(upload),
            request=spec.encoded(),
            idem=keys.key_hash(None if key is None else f"message batch {key}"),
            digest=digest,
            terms="" if terms is None else terms.public_json(),
            key_id=spec.key_id,
            **rows._asdict(),
        )
        if answer[0] == b"LOST":
            raise upload_dropped()
        return self._note_made(answer)

    @retried
    async def find(self, batch_id: str, tenant: str | None = None) -> BatchRecord:
        """Return a batch, of this tenant or (None) of any. Raises NotFoundError, and DamagedRecordError."""
        if not is_batch_id(batch_id):
            raise no_batch(batch_id)
        with translated():
            found = await self._redis.hgetall(keys.batch(batch_id))
        if not found or (tenant is not None and found.get(b"tenant") != tenant.encode()):
            raise no_batch(batch_id)
        return _record_of(batch_id, found)

    @retried
    async def ids(self, tenant: str) -> list[str]:
        """Return the ids of a tenant's batches, newest first."""
        with translated():
            found = await self._redis.zrange(keys.batches_of(tenant), 0, -1)
        return [one.decode() for one in reversed(found) if is_text(one)]

    @retried
    async def open_ids(self, limit: int) -> list[str]:
        """Return the ids of up to `limit` open batches of all tenants, those first that any process may take first."""
        with translated():
            found = await self._redis.zrange(f"{keys.prefix(keys.FILES)}:open_batches", 0, limit - 1)
        return [one.decode() for one in found if is_text(one)]

    @retried
    async def several(self, batch_ids: Sequence[str]) -> list[BatchRecord]:
        """Return those of these batches that there still are. A damaged record is logged, and hides its batch."""
        with translated():
            rows = await scripts.call_all(self._redis, [("HGETALL", keys.batch(one)) for one in batch_ids])
        records = []
        for batch_id, row in zip(batch_ids, rows, strict=True):
            try:
                if isinstance(row, Exception):
                    if not is_wrong_type(row):
                        raise row
                    raise DamagedRecordError(f"the record of batch {batch_id} is no hash")
                if row:
                    records.append(_record_of(batch_id, row))
            except DamagedRecordError as error:
                self._logged.warn("unreadable batch record", keys.batch(batch_id), error.message)
        return records

    @retried
    async def cancel(self, batch_id: str, tenant: str) -> None:
        """Begin to cancel a batch. Raises NotFoundError, and ConflictError if it has ended or is about to."""
        _check_change(batch_id, await call_script(self._redis, "cancel", id=batch_id, tenant=tenant))

    @retried
    async def delete(self, batch_id: str, tenant: str) -> None:
        """Drop a batch that has ended, with its files. Raises NotFoundError, and ConflictError for an open one."""
        message = f"batch {batch_id} has not ended; cancel it or wait for its end, then delete it"
        refusals = {
            b"NOT_FOUND": no_batch(batch_id),
            b"OPEN": ConflictError(message, code="batch_open", param="batch_id"),
        }
        check(await call_script(self._redis, "delete_batch", id=batch_id, tenant=tenant), refusals)

    @retried
    async def pause(self, batch_id: str, tenant: str, *, paused: bool) -> None:
        """Let no further rows of a batch into the queue, or let them again. Raises what `cancel` raises."""
        mark = "1" if paused else ""
        _check_change(batch_id, await call_script(self._redis, "pause", id=batch_id, tenant=tenant, paused=mark))

    @retried
    async def key(self, key_id: str) -> ApiKey | None:
        """Return an API key without its digest; None if there is none. Raises UnavailableError for damaged terms."""
        with translated():
            found = await self._redis.hget(keys.key_terms(), key_id)
        try:
            return None if found is None else ApiKey.of_public_json(found)
        except (ValueError, TypeError):
            message = f"the terms of the API key {key_id} are damaged; `penstock keys set` writes them again"
            raise UnavailableError(message, code=DamagedRecordError.code, retry_after_ms=5000) from None

    @retried
    async def num_rows_left(self) -> int:
        """Return how many rows of all open batches are in no part yet."""
        with translated():
            return whole(await self._redis.hget(keys.rows_left(), "*"))

    # For the holder of a lease. Each method raises BatchTakenError if another process has taken it.

    async def take(self, limit: int, lease_s: float, now_s: float) -> tuple[list[BatchLease], list[BatchEnd]]:
        """Take the leases of up to `limit` batches that no process holds. `now_s`: time of the event loop.

        Return also up to 32 ends of batches of which no webhook endpoint is told yet, until `note_told`.
        """
        step = 1 + secrets.randbelow(_MAX_TOKEN_STEP)
        answer = await call_script(self._redis, "take", limit=limit, lease_ms=int(1000 * lease_s), step=step)
        leases = [BatchLease(one[0].decode(), int(one[1]), now_s + lease_s) for one in answer[1]]
        return leases, [BatchEnd(*one.decode().split(" ")) for one in answer[2]]

    async def note_told(self, ends: Sequence[BatchEnd]) -> None:
        """Note that the webhook endpoints of these ends have their deliveries."""
        await call_script(self._redis, "told", ends=[" ".join(one) for one in ends])

    async def keep(self, leases: Sequence[BatchLease], lease_s: float, now_s: float) -> None:
        """Renew leases but for those that are given back, and note in each what became of it."""
        leases = [one for one in leases if not one.is_released]
        asked = [[one.batch_id, one.token, one.waiting, f"{one.rows_per_s:.3f}"] for one in leases]
        answer = await call_script(self._redis, "keep", leases=asked, lease_ms=int(1000 * lease_s))
        for lease, (status, paused) in zip(leases, answer[1], strict=True):
            if not status:
                lease.is_lost = True
            else:
                lease.status, lease.is_paused = status.decode(errors="replace"), bool(paused)
                lease.valid_until_s = now_s + lease_s

    async def release(self, lease: BatchLease) -> None:
        """Let any process take a batch at once."""
        lease.is_released = True
        await call_script(self._redis, "release", id=lease.batch_id, token=lease.token)

    @retried
    async def start(self, lease: BatchLease, num_rows: int, max_rows: int) -> str:
        """Note that the input is valid, and return the status. Raises BusyError beyond the tenant's limit of rows."""
        answer = await self._held(lease, "start", total=num_rows, max_rows=max_rows)
        if answer[0] == b"FULL":
            raise _too_many_rows(max_rows)
        return cast(str, answer[1].decode())

    @retried
    async def fail(self, lease: BatchLease, problems: Sequence[RowProblem], life_ms: int) -> None:
        """End a batch whose input is wrong."""
        await self._held(lease, "fail", errors=_encoded(problems), life_ms=life_ms)

    @retried
    async def commit(
        self,
        lease: BatchLease,
        part: str,
        files: Sequence[Part],
        rows: Sequence[int],
        counts: PartCounts,
        made: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Commit a part, whose objects are whole, with its rows. `made`: rows of a flow, and how many each has made."""
        listed = [[one.name, one.kind, one.num_bytes] for one in files]
        given = {"made": [[*one] for one in made]} if made else {}
        answer = await self._held(
            lease, "commit", part=part, files=listed, rows=list(rows), counts=asdict(counts), **given
        )
        if answer[0] != b"OK":
            raise InvariantError(f"row {answer[1]} of {lease.batch_id} is committed already")

    @retried
    async def finalize(self, lease: BatchLease, ending: str) -> None:
        """Note that all rows are committed, and the state in which the batch will end."""
        await self._held(lease, "finalize", ending=ending)

    @retried
    async def finish(
        self,
        lease: BatchLease,
        status: str,
        files: Mapping[str, NewFile],
        life_ms: int,
        problems: Sequence[RowProblem] = (),
    ) -> None:
        """End a batch and save its files, by kind (`output`, `error`)."""
        given = {kind: file_arguments(file) for kind, file in files.items()}
        errors = _encoded(problems) if problems else ""
        await self._held(lease, "finish", status=status, files=given, life_ms=life_ms, errors=errors)

    @retried
    async def committed_rows(self, batch_id: str) -> bytes:
        """Return a bit per row, the highest of each byte first: whether a part has it."""
        with translated():
            return cast(bytes, await self._redis.get(keys.batch_rows(batch_id)) or b"")

    @retried
    async def parts(self, batch_id: str) -> list[Part]:
        """Return the committed parts. Raises DamagedRecordError."""
        with translated():
            found = await self._redis.lrange(keys.batch_parts(batch_id), 0, -1)
        return [_part_of(batch_id, one) for one in found]

    @retried
    async def job_ids(self, pools: Sequence[str], tenant: str, row_keys: Sequence[str]) -> dict[str, str]:
        """Return the jobs that were submitted with these idempotency keys, by key."""
        asked = [(key, pool) for key in row_keys for pool in pools]
        commands = [("GET", keys.idempotency(pool, tenant, keys.key_hash(key))) for key, pool in asked]
        with translated():
            found = await scripts.call_all(self._redis, commands) if commands else []
        return {key: one.decode() for (key, _), one in zip(asked, found, strict=True) if isinstance(one, bytes)}

    def _note_made(self, answer: Sequence[Any]) -> str:
        """Return the id of the batch that a script has made, or raise the error for its refusal."""
        match answer[0]:
            case b"FULL":
                message = f"the tenant has {answer[1]} open batches (PENSTOCK_FILES_MAX_TENANT_BATCHES); wait for one"
                raise BusyError(message, code="too_many_batches", retry_after_ms=_RETRY_MS)
            case b"FULL_ROWS":
                raise _too_many_rows(int(answer[1]))
            case b"CONFLICT":
                raise key_conflict(f"batch {answer[1].decode()}")
        self.made.set()
        return cast(str, answer[1].decode())

    async def _held(self, lease: BatchLease, what: str, **arguments: Any) -> list[Any]:
        answer = await call_script(self._redis, what, id=lease.batch_id, token=lease.token, **arguments)
        if answer[0] == b"LOST":
            lease.is_lost = True
            raise BatchTakenError(f"another process has taken {lease.batch_id}")
        return answer


def _too_many_rows(max_rows: int) -> BusyError:
    message = f"the tenant's open batches would have more than {max_rows} rows (PENSTOCK_FILES_MAX_TENANT_ROWS)"
    return BusyError(message, code="too_many_rows", retry_after_ms=_RETRY_MS)


def _check_change(batch_id: str, answer: Sequence[Any]) -> None:
    if answer[0] == b"NOT_FOUND":
        raise no_batch(batch_id)
    if answer[0] == b"ENDED":
        message = f"batch {batch_id} is {answer[1].decode()}, so it cannot be changed"
        raise ConflictError(message, code="batch_ended", param="batch_id")


_MAX_RATE = 1e9
"""Rows a second that a batch may have."""


def _part_of(batch_id: str, data: bytes) -> Part:
    name, _, rest = data.decode(errors="replace").partition(" ")
    kind, _, num_bytes = rest.partition(" ")
    if not name.startswith(f"parts/{batch_id}/") or ".." in name or not num_bytes.isdecimal():
        raise DamagedRecordError(f"the list of the parts of batch {batch_id} is damaged")
    return Part(name, kind, int(num_bytes))


def _record_of(batch_id: str, found: Mapping[bytes, bytes]) -> BatchRecord:
    """Return a batch. Raises DamagedRecordError that names the field."""
    fields = RecordFields(f"batch {batch_id}", found)
    status = fields.one_of("status", OPEN_STATES | ENDED_STATES)
    ending = fields.text("ending", "")
    if status == "finalizing" or ending:
        fields.one_of("ending", ENDED_STATES)
    times = {name: fields.time_ms(f"{name}_at") for name in TIMES if f"{name}_at" in fields}
    for name in ("created", "expires", *(() if status in OPEN_STATES else (status,))):
        fields.time_ms(f"{name}_at")
    return BatchRecord(
        batch_id=batch_id,
        tenant=fields.text("tenant"),
        spec=fields.parsed("request", _spec_of),
        status=status,
        ending=ending,
        times=times,
        num_rows=fields.whole("total"),
        num_completed=fields.whole("completed"),
        num_failed=fields.whole("failed"),
        num_stopped=fields.whole("stopped", 0),
        input_tokens=fields.whole("input_tokens"),
        cached_tokens=fields.whole("cached_tokens"),
        output_tokens=fields.whole("output_tokens"),
        reasoning_tokens=fields.whole("reasoning_tokens", 0),
        output_file_id=fields.text("output_file", "") or None,
        error_file_id=fields.text("error_file", "") or None,
        problems=fields.parsed("errors", _problems_of, []),
        is_paused=bool(fields.text("paused", "")),
        waiting=fields.text("waiting", ""),
        rows_per_s=fields.parsed("rate", _rate_of, 0.0),
        made=fields.parsed("made", _made_of, ()),
    )


def _problems_of(text: str) -> list[RowProblem]:
    return [RowProblem(**one) for one in json.loads(text)]


def _spec_of(text: str) -> BatchSpec:
    spec = BatchSpec.decoded(text)
    if not is_file_id(spec.input_file_id):
        raise ValueError(text)
    return spec


def _made_of(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (one.split(":") for one in text.split())
    return tuple((int(number), int(count)) for number, count in pairs)


def _rate_of(text: str) -> float:
    if not 0 <= (rate := round(float(text), 3)) <= _MAX_RATE:
        raise ValueError(text)
    return rate


def _encoded(problems: Sequence[RowProblem]) -> str:
    return json.dumps([asdict(problem) for problem in problems])
