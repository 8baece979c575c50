"""A Redis that is set back to an earlier state under a new history, as after a fail-over that lost writes."""

from __future__ import annotations

from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

NOWHERE = "127.0.0.1", "1"


async def saved(redis: Redis) -> dict[bytes, tuple[int, bytes]]:
    """Return all keys, each with its remaining life in ms (0: no limit) and its value."""
    async with redis.pipeline() as pipe:
        names = cast(list[bytes], await redis.keys("*"))
        for name in names:
            pipe.pttl(name)
            pipe.dump(name)
        answers: list[Any] = await pipe.execute()
    lives, values = answers[::2], answers[1::2]
    return {name: (max(0, life), value) for name, life, value in zip(names, lives, values, strict=True) if value}


async def set_back(redis: Redis, kept: dict[bytes, tuple[int, bytes]]) -> None:
    """Give Redis the saved keys alone, and another replication id, in one step."""
    async with redis.pipeline() as pipe:
        pipe.flushdb()
        for name, (life_ms, value) in kept.items():
            pipe.restore(name, life_ms, value)
        _change_history(pipe)
        await pipe.execute()


async def new_history(redis: Redis) -> None:
    """Give the server another replication id: it becomes a replica, and a primary again."""
    async with redis.pipeline() as pipe:
        _change_history(pipe)
        await pipe.execute()


def _change_history(pipe: Pipeline) -> None:
    for place in (NOWHERE, ("NO", "ONE")):
        pipe.execute_command("REPLICAOF", *place)
