"""The Lua scripts: called by EVALSHA, and loaded again when Redis no longer has them."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import msgpack
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from penstock.contract.job import pool_of
from penstock.queue import keys
from penstock.queue.broker.connection import translated
from penstock.queue.broker.script_text import source
from penstock.queue.broker.shared_connection import SharedRedis
from penstock.queue.wire import PACK_BYTES
from penstock.runtime import crash_points

_LOG = logging.getLogger(__package__)
Argument = bytes | str | int | float


# Of one user, or of our own code and files.
@cache
def _digest(name: str) -> str:
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


def packed(value: Any) -> bytes:
    """Pack many arguments into one msgpack value, because redis-py is slow at sending hundreds of arguments.

    Bytes are packed as strings, the only type that Redis's Lua has for them.
    """
    return cast(bytes, msgpack.packb(value, use_bin_type=False, buf_size=PACK_BYTES))


async def call(redis: Redis, name: str, pool: str, *arguments: Argument) -> Any:
    """Run one script of a pool and return its answer. Raises the errors of `connection.translated`."""
    return await call_at(redis, name, keys.config(pool), *arguments)


async def call_at(redis: Redis, name: str, config: str, *arguments: Argument) -> Any:
    """Run one script as `call` does. `config`: the key that gives the prefix of all its keys."""
    crash_points.point("before", name)
    with translated():
        try:
            answer = await redis.evalsha(_digest(name), 1, config, *arguments)
        except NoScriptError:
            answer = await redis.eval(source(name), 1, config, *arguments)
    crash_points.point("after", name)
    return answer


async def call_all(redis: Redis, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
    """Run small commands, sent together. Return their answers as redis-py gives them, or ResponseErrors."""
    if isinstance(redis, SharedRedis):
        replies = await redis.execute_all(commands)
        forms = [redis.response_callbacks.get(str(one[0])) for one in commands]
        return [
            reply if form is None or isinstance(reply, Exception) else form(reply)
            for reply, form in zip(replies, forms, strict=True)
        ]
    async with redis.pipeline(transaction=False) as pipe:
        for one in commands:
            pipe.execute_command(*one)
        return await pipe.execute(raise_on_error=False)


def command(name: str, pool: str, arguments: Sequence[Argument], *, whole: bool = False) -> tuple[Argument, ...]:
    """Return the command that runs one script of a pool: by its digest, or with its `whole` text."""
    form = ("EVAL", source(name)) if whole else ("EVALSHA", _digest(name))
    return *form, 1, keys.config(pool), *arguments


def start(redis: Redis, name: str, pool: str, *arguments: Argument, on_reply: Callable[[Any], None]) -> bool:
    """Run one script of a pool over an open connection, and pass its answer to `on_reply`, which must not raise.

    A call that fails, or a script that Redis no longer has, gives an exception of redis-py. Return whether it was sent.
    """
    if not isinstance(redis, SharedRedis):
        return False
    crash_points.point("before", name)

    def receive(reply: Any) -> None:
        crash_points.point("after", name)
        on_reply(reply)

    return redis.send_now(receive, *command(name, pool, arguments))


class PoolClocks:
    """The time of pools, as one process knows it: what its last sweep was told, and its own clock since then.

    Redis's clock may jump, such as after a fail-over to another machine. Then this decides (prelude.lua, `clock`).
    """

    def __init__(self) -> None:
        # Keyed by id: pool.
        self._read: dict[str, tuple[int, float]] = {}

    def note(self, pool: str, now_ms: int) -> None:
        """Keep the time that a sweep of the pool answered."""
        self._read[pool] = now_ms, _uptime_s()

    def seen_ms(self, pool: str) -> int:
        """Return the pool's time; 0 if this process has not swept the pool."""
        if (read := self._read.get(pool)) is None:
            return 0
        read_ms, read_s = read
        return read_ms + round(1000 * (_uptime_s() - read_s))

    def alive_since_ms(self, pool: str, now_ms: int, lease_ms: int) -> int:
        """Return the oldest heartbeat with which a node counts as alive: one lease ago.

        `now_ms`: the pool's time by Redis's clock. It does not count if it has jumped, until a sweep corrects it.
        """
        return self.believed_ms(pool, now_ms, lease_ms) - lease_ms

    def believed_ms(self, pool: str, now_ms: int, lease_ms: int) -> int:
        """Return the pool's time. `now_ms`: the same by Redis's clock."""
        seen_ms = self.seen_ms(pool)
        return seen_ms if seen_ms and abs(now_ms - seen_ms) > lease_ms / 2 else now_ms


def _uptime_s() -> float:
    """Return a clock that also runs while the machine is suspended, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def log_ends(rows: Sequence[Sequence[bytes]]) -> None:
    """Write the line of each job that a script ended and that no node reported. A node's line has more fields."""
    for row in rows:
        job_id, tenant, state, code = (one.decode(errors="replace") for one in row)
        _LOG.info("job.ended", extra={"job_id": job_id, "tenant": tenant, "finish_reason": state, "code": code})


async def cancel(redis: Redis, job_id: str, tenant: str) -> str:
    """Cancel a job. Return its state after the call, or NOT_FOUND."""
    state, ended = await call(redis, "cancel", pool_of(job_id), job_id, tenant)
    log_ends(ended)
    return cast(bytes, state).decode()


async def sweep(redis: Redis, pool: str, clocks: PoolClocks) -> float | None:
    """Find dead nodes and due jobs, and log the dead nodes. The script limits how often it runs.

    `clocks` tell it the pool's time if Redis's clock has jumped, and learn it otherwise. Return the seconds until the
    lease of the longest silent node ends, None if there is no node.
    """
    kind, now_ms, *found = await call(redis, "sweep", pool, clocks.seen_ms(pool))
    if now_ms:
        clocks.note(pool, int(now_ms))
    if kind == b"RESET" and found[0]:
        _LOG.warning("redis's clock has jumped", extra={"pool": pool, "jump_ms": int(found[0])})
    if kind == b"OK":
        lost, num_requeued, ended, _ = found
        log_ends(ended)
        if lost:
            # Only the process that found them logs them, because Redis keeps no trace of these nodes.
            node_ids = [node_id.decode() for node_id in lost]
            facts = {"pool": pool, "node_ids": node_ids, "num_requeued": num_requeued, "num_ended": len(ended)}
            _LOG.warning("nodes are lost", extra=facts)
    return int(found[-1]) / 1e3 if kind != b"RESET" and int(found[-1]) >= 0 else None
