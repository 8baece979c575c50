"""The audit of stored files and batches: their lists and sums in Redis against their records.

What changes between two looks is no finding. So a fault is one that two looks find.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from redis.asyncio import Redis

from penstock.contract.errors import DamagedRecordError
from penstock.contract.fields import NAME_PATTERN
from penstock.queue import keys
from penstock.queue.broker.audit import Finding
from penstock.queue.broker.connection import translated
from penstock.queue.files.batch import ENDED_STATES, OPEN_STATES
from penstock.queue.files.file_records import UPLOAD_LEASE_MS, call_script, object_of
from penstock.queue.record_fields import RecordFields, is_text, unless_wrong_type, whole

_SUMS = ("stored", "num_files", "uploading", "num_uploads", "num_open", "rows_left")
_ALL = "*"
_TYPES = {
    **dict.fromkeys((*_SUMS, "file", "upload", "batch", "keys"), "hash"),
    **dict.fromkeys(("files", "uploads", "expiry", "garbage", "batches", "open_batches", "untold"), "zset"),
    "parts": "list",
    "rows": "string",
    "storage": "string",
    "idem": "string",
}
"""The types of the keys, by the first part of their name."""
_ENDED_LIFE_MS = 30 * 86_400_000
"""Life of an ended batch whose end is lost."""
T = TypeVar("T")
_SCAN_COUNT = 1000


@dataclass(slots=True)
class _Seen:
    """What one look found: hashes, members of sorted sets, and the names of all keys, without `F:`."""

    # Of one user, or of our own code and files.
    hashes: dict[str, dict[bytes, bytes]] = field(default_factory=dict)
    # Of one user, or of our own code and files.
    members: dict[str, dict[str, float]] = field(default_factory=dict)
    """With their scores."""
    names: set[str] = field(default_factory=set)
    damaged: set[Finding] = field(default_factory=set)
    strays: list[tuple[str, bytes]] = field(default_factory=list)
    """(list, member): members that are no text."""

    def of_kind(self, kind: str) -> Iterator[tuple[str, RecordFields]]:
        """Yield id and fields of the records whose key begins with `kind:`."""
        for name, fields in self.hashes.items():
            head, _, record_id = name.partition(":")
            if head == kind and record_id:
                yield record_id, RecordFields(name, fields)


async def audit_files(redis: Redis, *, repair: bool = False) -> list[Finding] | None:
    """Return all violations, or None if there are neither files nor batches. Raises UnavailableError.

    With `repair`, lists and sums are corrected by what two looks found.
    """
    first = await _look(redis)
    if not first.names - {"keys"}:
        return None
    wrong_types = {one for one in first.damaged if one.name == "wrong_type"}
    if repair and wrong_types:
        names = [(one.key, _TYPES[one.key.partition(":")[0]]) for one in wrong_types]
        await call_script(redis, "mend", names=names)
        first = await _look(redis)
    once, again = _Wanted(first), _Wanted(await _look(redis))
    found = sorted(wrong_types | (set(_findings(once)) & set(_findings(again))))
    if repair:
        await _repair(redis, once, again)
    return found


async def _repair(redis: Redis, once: _Wanted, again: _Wanted) -> None:
    excess, known = once.excess(), {(name, one) for name, one, _ in once.wrong_members()}
    sums = [
        [name, of, -by, is_lost]
        for (name, of), (by, is_lost) in again.excess().items()
        if excess.get((name, of)) == (by, is_lost)
    ]
    members: list[Any] = [[name, one, score] for name, one, score in again.wrong_members() if (name, one) in known]
    members += [[name, one, ""] for name, one in again.seen.strays]
    if sums or members:
        await call_script(redis, "correct", sums=sums, members=members)


async def _look(redis: Redis) -> _Seen:
    client, seen, begin = cast(Any, redis), _Seen(), f"{keys.prefix(keys.FILES)}:"
    with translated():
        async for key in client.scan_iter(match=begin.replace("{", "\\{") + "*", count=_SCAN_COUNT):
            if not is_text(key):
                seen.damaged.add(Finding("foreign", repr(key)[2:-1], "-", "its name is no text"))
                continue
            name, kind = key.decode().removeprefix(begin), (await client.type(key)).decode()
            seen.names.add(name)
            wanted = _TYPES.get(name.partition(":")[0], kind)
            if kind not in (wanted, "none"):
                seen.damaged.add(Finding("wrong_type", name, "-", f"it is a {kind}, not a {wanted}"))
            elif kind == "hash":
                seen.hashes[name] = await client.hgetall(key)
            elif kind == "zset":
                listed = await client.zrange(key, 0, -1, withscores=True)
                seen.members[name] = {one.decode(): score for one, score in listed if is_text(one)}
                seen.strays += [(name, one) for one, _ in listed if not is_text(one)]
    return seen


@dataclass(frozen=True, slots=True)
class Contents:
    """The objects of the storage that records name, with their bytes."""

    files: dict[str, int]
    """Without those that are marked as lost."""
    parts: dict[str, int]
    """The committed parts of open batches."""
    open_batches: frozenset[str]


async def contents_of(redis: Redis) -> Contents:
    """Return what the storage should have. Raises UnavailableError."""
    seen, client = await _look(redis), cast(Any, redis)
    wanted = _Wanted(seen)
    files = {
        object_of(file_id): fields.whole("bytes")
        for file_id, fields in seen.of_kind("file")
        if file_id not in wanted.lost_ids and fields.text("lost", "") != "1"
    }
    parts: dict[str, int] = {}
    open_batches = wanted.listed["open_batches"]
    for batch_id in open_batches:
        with translated():
            listed = await unless_wrong_type(list[bytes](), client.lrange, keys.batch_parts(batch_id), 0, -1)
        for one in listed:
            name, _, rest = one.decode(errors="replace").partition(" ")
            parts[name] = whole(rest.rpartition(" ")[2])
    return Contents(files, parts, frozenset(open_batches))


class _Wanted:
    """What the records say that lists and sums hold."""

    def __init__(self, seen: _Seen) -> None:
        self.seen = seen
        self.sums = {name: Counter[str]() for name in _SUMS}
        self.listed: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """Lists with their members, and the score that a missing member gets."""
        self.readers = Counter[str]()
        self.lost = set[Finding]()
        """Fields of records that cannot be read."""
        self.lost_ids = set[str]()
        now_ms = time.time_ns() // 1_000_000
        for upload_id, fields in seen.of_kind("upload"):
            self.listed["uploads"][upload_id] = now_ms + UPLOAD_LEASE_MS
            self._add(
                self._read(upload_id, fields, _tenant_of),
                uploading=self._read(upload_id, fields, _bytes_of) or 0,
                num_uploads=1,
            )
        for batch_id, fields in seen.of_kind("batch"):
            self._add_batch(batch_id, fields, now_ms)
        for file_id, fields in seen.of_kind("file"):
            self._add_file(file_id, fields)

    def _add_file(self, file_id: str, fields: RecordFields) -> None:
        tenant, num_bytes = self._read(file_id, fields, _tenant_of), self._read(file_id, fields, _bytes_of) or 0
        created_ms = self._read(file_id, fields, lambda of: of.time_ms("created")) or 0
        expires_ms = self._read(file_id, fields, lambda of: of.text("expires") and of.time_ms("expires"))
        if tenant is not None:
            self.listed[f"files:{tenant}"][file_id] = created_ms
            self._add(tenant, stored=num_bytes, num_files=1)
        if expires_ms:
            self.listed["expiry"][f"file:{file_id}"] = int(expires_ms)

    def _add_batch(self, batch_id: str, fields: RecordFields, now_ms: int) -> None:
        tenant = self._read(batch_id, fields, _tenant_of)
        created_ms = self._read(batch_id, fields, lambda of: of.time_ms("created_at")) or 0
        status = self._read(batch_id, fields, lambda of: of.one_of("status", OPEN_STATES | ENDED_STATES))
        if tenant is not None:
            self.listed[f"batches:{tenant}"][batch_id] = created_ms
        if status in ENDED_STATES:
            self.listed["expiry"][f"batch:{batch_id}"] = now_ms + _ENDED_LIFE_MS
        if status not in OPEN_STATES:
            return
        self.listed["open_batches"][batch_id] = 0
        left = self._read(batch_id, fields, lambda of: of.whole("left")) or 0
        if (file_id := self._read(batch_id, fields, lambda of: of.text("file"))) is not None:
            self.readers[file_id] += 1
        self._add(tenant, num_open=1, rows_left=left)

    def _read(self, record_id: str, fields: RecordFields, read: Callable[[RecordFields], T]) -> T | None:
        try:
            return read(fields)
        except DamagedRecordError as error:
            self.lost.add(Finding("lost_field", fields.what, record_id, error.message))
            self.lost_ids.add(record_id)
            return None

    def _add(self, tenant: str | None, **values: int) -> None:
        for name, value in values.items():
            self.sums[name].update({_ALL: value} if tenant is None else {tenant: value, _ALL: value})

    def excess(self) -> dict[tuple[str, str], tuple[int, bool]]:
        """Return by how much each sum is wrong, and whether it is no number; then it exceeds 0 by that."""
        found: dict[tuple[str, str], tuple[int, bool]] = {}
        for name, values in self.sums.items():
            stored = {of.decode(): value for of, value in self.seen.hashes.get(name, {}).items() if is_text(of)}
            for tenant in values.keys() | stored.keys():
                found[name, tenant] = _excess(stored.get(tenant, b"0"), values[tenant])
        for file_id, _ in self.seen.of_kind("file"):
            stored_readers = self.seen.hashes[f"file:{file_id}"].get(b"readers", b"0")
            found[f"file:{file_id}", "readers"] = _excess(stored_readers, self.readers[file_id])
        return {where: one for where, one in found.items() if one != (0, False)}

    def wrong_members(self) -> Iterator[tuple[str, str, int | str]]:
        """Yield list, member and score of the missing ones, and an empty text for strays."""
        members = self.seen.members
        for name in self.listed.keys() | members.keys() - {"garbage", "untold"}:
            should, found = self.listed.get(name, {}), members.get(name, {})
            yield from ((name, one, should[one]) for one in should.keys() - found)
            strays = found - should.keys()
            yield from ((name, one, "") for one in strays if one.rpartition(":")[2] not in self.lost_ids)


def _tenant_of(fields: RecordFields) -> str:
    return fields.parsed("tenant", _name_of)


def _name_of(text: str) -> str:
    if re.fullmatch(NAME_PATTERN, text) is None:
        raise ValueError(text)
    return text


def _bytes_of(fields: RecordFields) -> int:
    return fields.whole("bytes")


def _excess(stored: bytes, wanted: int) -> tuple[int, bool]:
    is_number = re.fullmatch(rb"-?\d{1,15}", stored) is not None
    return (int(stored) - wanted, False) if is_number else (-wanted, True)


def _findings(wanted: _Wanted) -> Iterator[Finding]:
    yield from wanted.seen.damaged
    yield from wanted.lost
    yield from (Finding("stray", name, repr(one)[2:-1], "it is no text") for name, one in wanted.seen.strays)
    for name, one, score in wanted.wrong_members():
        if score == "":
            yield Finding("stray", name, one, "no record of it")
        else:
            yield Finding("missing", name, one, "its record says otherwise")
    for (name, of), (by, is_lost) in wanted.excess().items():
        yield Finding("wrong_sum", name, of, "it is no number" if is_lost else f"off by {by}")
    for name in wanted.seen.names:
        kind, _, batch_id = name.partition(":")
        if kind in ("parts", "rows") and batch_id not in wanted.listed["open_batches"].keys() | wanted.lost_ids:
            yield Finding("lives_for_ever", name, batch_id, "its batch has ended")
