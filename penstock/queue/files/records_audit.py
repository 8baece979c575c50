"""The audit of stored files and batches: their lists and sums in Redis against their records.

What changes between two looks is no finding. So a fault is one that two looks find.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from redis.asyncio import Redis

from penstock.queue import keys
from penstock.queue.broker.audit import Finding
from penstock.queue.broker.connection import translated
from penstock.queue.files.batch import OPEN_STATES
from penstock.queue.files.file_records import object_of

_SUMS = ("stored", "num_files", "uploading", "num_uploads", "num_open", "rows_left")
_ALL = "*"
_SCAN_COUNT = 1000


@dataclass(slots=True)
class _Seen:
    """What one look found: hashes, members of sorted sets, and the names of all keys, without `F:`."""

    # Of one user, or of our own code and files.
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    # Of one user, or of our own code and files.
    members: dict[str, set[str]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def of_kind(self, kind: str) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield id and fields of the records whose key begins with `kind:`."""
        for name, fields in self.hashes.items():
            head, _, record_id = name.partition(":")
            if head == kind and record_id:
                yield record_id, fields


async def audit_files(redis: Redis) -> list[Finding] | None:
    """Return all violations, or None if there are neither files nor batches. Raises UnavailableError."""
    first = await _look(redis)
    if not first.names - {"keys"}:
        return None
    once, again = set(_findings(first)), set(_findings(await _look(redis)))
    return sorted(once & again)


async def _look(redis: Redis) -> _Seen:
    client, seen, begin = cast(Any, redis), _Seen(), f"{keys.prefix(keys.FILES)}:"
    with translated():
        async for key in client.scan_iter(match=begin.replace("{", "\\{") + "*", count=_SCAN_COUNT):
            name, kind = key.decode().removeprefix(begin), await client.type(key)
            seen.names.add(name)
            if kind == b"hash":
                found = await client.hgetall(key)
                seen.hashes[name] = {one.decode(): value.decode() for one, value in found.items()}
            elif kind == b"zset":
                seen.members[name] = {one.decode() for one in await client.zrange(key, 0, -1)}
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
    files = {
        object_of(file_id): int(fields["bytes"])
        for file_id, fields in seen.of_kind("file")
        if fields.get("lost") != "1"
    }
    parts: dict[str, int] = {}
    open_batches = [batch_id for batch_id, fields in seen.of_kind("batch") if fields["status"] in OPEN_STATES]
    for batch_id in open_batches:
        with translated():
            for one in await client.lrange(keys.batch_parts(batch_id), 0, -1):
                name, _, num_bytes = one.decode().split(" ")
                parts[name] = int(num_bytes)
    return Contents(files, parts, frozenset(open_batches))


class _Wanted:
    """What the records say that lists and sums hold."""

    def __init__(self, seen: _Seen) -> None:
        self.seen = seen
        self.sums = {name: Counter[str]() for name in _SUMS}
        self.listed: defaultdict[str, set[str]] = defaultdict(set)
        self.readers = Counter[str]()
        for upload_id, fields in seen.of_kind("upload"):
            self.listed["uploads"].add(upload_id)
            self._add(fields["tenant"], uploading=int(fields["bytes"]), num_uploads=1)
        for batch_id, fields in seen.of_kind("batch"):
            self._add_batch(batch_id, fields)
        for file_id, fields in seen.of_kind("file"):
            self.listed[f"files:{fields['tenant']}"].add(file_id)
            self._add(fields["tenant"], stored=int(fields["bytes"]), num_files=1)
            if fields["expires"]:
                self.listed["expiry"].add(f"file:{file_id}")

    def _add_batch(self, batch_id: str, fields: Mapping[str, str]) -> None:
        self.listed[f"batches:{fields['tenant']}"].add(batch_id)
        if fields["status"] not in OPEN_STATES:
            self.listed["expiry"].add(f"batch:{batch_id}")
            return
        self.listed["open_batches"].add(batch_id)
        self.readers[fields["file"]] += 1
        self._add(fields["tenant"], num_open=1, rows_left=int(fields["left"]))

    def _add(self, tenant: str, **values: int) -> None:
        for name, value in values.items():
            self.sums[name].update({tenant: value, _ALL: value})


def _findings(seen: _Seen) -> Iterator[Finding]:
    wanted = _Wanted(seen)
    yield from _of_lists(wanted)
    yield from _of_sums(wanted)
    for name in seen.names:
        kind, _, batch_id = name.partition(":")
        if kind in ("parts", "rows") and batch_id not in wanted.listed["open_batches"]:
            yield Finding("lives_for_ever", name, batch_id, "its batch has ended")


def _of_lists(wanted: _Wanted) -> Iterator[Finding]:
    members = wanted.seen.members
    for name in wanted.listed.keys() | members.keys() - {"garbage", "untold"}:
        should, found = wanted.listed.get(name, set()), members.get(name, set())
        yield from (Finding("missing", name, one, "its record says otherwise") for one in should - found)
        yield from (Finding("stray", name, one, "no record of it") for one in found - should)


def _of_sums(wanted: _Wanted) -> Iterator[Finding]:
    for name, values in wanted.sums.items():
        found = {tenant: int(value) for tenant, value in wanted.seen.hashes.get(name, {}).items()}
        for tenant in values.keys() | found.keys():
            if (by := found.get(tenant, 0) - values[tenant]) != 0:
                yield Finding("wrong_sum", name, tenant, f"off by {by}")
    for file_id, fields in wanted.seen.of_kind("file"):
        if int(fields["readers"]) != wanted.readers[file_id]:
            detail = f"{fields['readers']} readers, and {wanted.readers[file_id]} open batches read it"
            yield Finding("wrong_sum", f"file:{file_id}", file_id, detail)
