"""Pools that no node serves: their entry in the list and their record, as a node writes them."""

from __future__ import annotations

from typing import Any

from penstock.contract.pool import PoolEntry, PoolRecord
from penstock.queue import keys, wire


def announcing(record: PoolRecord) -> list[tuple[Any, ...]]:
    """Return the Redis commands that list a pool with this record."""
    entry = wire.encode_entry(PoolEntry(record.pool))
    return [("HSET", keys.POOLS, record.pool, entry), ("SET", keys.record(record.pool), wire.encode_record(record))]


def withdrawing(pool: str) -> list[tuple[Any, ...]]:
    """Return the commands that undo `announcing`."""
    return [("HDEL", keys.POOLS, pool), ("DEL", keys.record(pool))]
