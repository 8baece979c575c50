"""Damage to what Redis has: each field, member and key of a snapshot, in each way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis as sync_redis

VALUES: dict[str, bytes] = {
    "empty": b"",
    "text": b"junk",
    "negative": b"-5",
    "NaN": b"nan",
    "infinite": b"inf",
    "huge": b"1e300",
    "long": b"9" * 40,
    "bytes": b"\xff\xfe",
    "another": b"7",
}
_OF_SCORES = {"infinite": float("inf"), "below all": float("-inf"), "negative": -5.0, "another": 7.0}
_MEMBERS = {"text member": b"junk", "member of bytes": b"\xff\xfe"}


@dataclass(frozen=True)
class Cell:
    """One kind of damage to one field of a hash, a member of a collection, or a whole key (`field` is None)."""

    key: bytes
    field: bytes | None
    way: str

    def __str__(self) -> str:
        return f"{self.key!r} {self.field!r} {self.way}"


class Snapshot:
    """All keys of a Redis with a prefix, and their damage one after another."""

    def __init__(self, url: str, *prefixes: str) -> None:
        self.redis: Any = sync_redis.Redis.from_url(url)
        self._prefixes = tuple(prefix.encode() for prefix in prefixes)
        self._kept = {key: (self.redis.dump(key), max(0, self.redis.pttl(key))) for key in self._keys()}

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.redis.close()

    def _keys(self) -> list[bytes]:
        return sorted(key for key in self.redis.scan_iter(count=1000) if key.startswith(self._prefixes))

    def restore(self) -> None:
        """Let the keys be as they were."""
        with self.redis.pipeline(transaction=True) as pipe:
            for key in self._keys():
                pipe.delete(key)
            for key, (value, ttl) in self._kept.items():
                pipe.restore(key, ttl, value, replace=True)
            pipe.execute()

    def cells(self) -> Iterator[Cell]:
        """Yield all damage."""
        for key in self._kept:
            kind = self.redis.type(key)
            if kind == b"hash":
                for field in self.redis.hkeys(key):
                    yield from (Cell(key, field, way) for way in ("absent", *VALUES))
            elif kind == b"string":
                yield from (Cell(key, None, way) for way in VALUES)
            elif kind == b"zset":
                yield from (Cell(key, b"score", way) for way in _OF_SCORES)
            if kind not in (b"hash", b"string"):
                yield from (Cell(key, b"", way) for way in _MEMBERS)
            yield Cell(key, None, "absent")
            yield Cell(key, None, "wrong type")

    def damage(self, cell: Cell) -> None:
        """Do the damage of a cell."""
        redis, key, kind = self.redis, cell.key, self.redis.type(cell.key)
        if cell.way in _MEMBERS:
            _add(redis, key, kind, _MEMBERS[cell.way])
        elif cell.field == b"score":
            redis.zadd(key, {redis.zrange(key, 0, 0)[0]: _OF_SCORES[cell.way]})
        elif cell.field is not None and cell.way == "absent":
            redis.hdel(key, cell.field)
        elif cell.field is not None:
            redis.hset(key, cell.field, VALUES[cell.way])
        elif cell.way in VALUES:
            redis.set(key, VALUES[cell.way], keepttl=True)
        else:
            redis.delete(key)
            if cell.way == "wrong type":
                redis.set(key, "junk") if kind == b"list" else redis.rpush(key, "junk")


def _add(redis: Any, key: bytes, kind: bytes, member: bytes) -> None:
    if kind == b"zset":
        redis.zadd(key, {member: 5})
    elif kind == b"set":
        redis.sadd(key, member)
    elif kind == b"list":
        redis.rpush(key, member)
    else:
        redis.xadd(key, {member: member})
