"""Damage of one place of a pool: a key, or a field or member of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from fakes.queue.harness import P
from redis.asyncio import Redis

VALUES = {
    "absent": None,
    "empty": b"",
    "text": b"x y",
    "negative": b"-5",
    "nan": b"nan",
    "infinite": b"inf",
    "huge": b"1" + 30 * b"0",
    "other": b"3",
}
NUMBERS = {"negative": -5.0, "infinite": float("inf"), "huge": 1e30, "other": 3.0}
WRONG_TYPE = "wrong type"


async def damage(client: Redis, name: str, inside: bytes, kind: str, how: str) -> bool:
    """Damage one place. Return whether this value can be written there."""
    redis = cast(Any, client)
    if how == WRONG_TYPE:
        await redis.delete(name)
        await (redis.rpush(name, "x") if kind == "string" else redis.set(name, "x"))
    elif how == "absent" or kind in ("set", "list", "stream"):
        if how != "absent":
            return False
        await (redis.hdel(name, inside) if kind == "hash" else redis.delete(name))
    elif kind == "hash":
        await redis.hset(name, inside, VALUES[how])
    elif kind == "zset" and how in NUMBERS:
        await redis.zadd(name, {inside: NUMBERS[how]})
    elif kind == "zset":
        await redis.zadd(name, {b"x" if how == "text" else VALUES[how]: 1})
    else:
        await redis.set(name, VALUES[how])
    return True


def hows_of(kind: str) -> Iterator[str]:
    """Return how a place of this type of key can be damaged."""
    yield from (WRONG_TYPE, "absent")
    if kind not in ("set", "list", "stream"):
        yield from [how for how in VALUES if how != "absent"]


def means_what_it_says(name: str, inside: bytes, how: str) -> bool:
    """Whether the others have to wait: the nodes must join again, or the value is one that lets them wait."""
    match name.removeprefix(f"{P}:"), inside:
        case "nodes", _:
            return True
        case "config", _ if how == WRONG_TYPE:
            return True
        case "config", b"max_open_jobs" | b"max_queued_cost":
            return how == "other"
        case "config", b"version":
            return how in ("absent", "other")
        case _, b"losses":
            return how == "other"  # The next loss is the last one, so the job runs alone.
    return False
