"""The open jobs of a pool by state and level, at a cost that does not depend on their number.

Queued jobs are counted by index, one for each level. Scheduled jobs lie in lanes, one for each tenant and level, and
jobs that wait for tokens in one set for each tenant. So a read counts at most `MAX_LANES` lanes and `MAX_TENANTS` sets,
those that fall due first. Its pipelines have few commands each, so that Redis serves other clients between two of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, cast

from redis.asyncio import Redis

from penstock.contract.pauses import Pause
from penstock.contract.pool import NO_JOBS, NodePressure, QueueState, WaitingJobs, WaitState
from penstock.contract.priority import NUM_LEVELS, NUM_PRIORITIES, PerLevel
from penstock.queue import keys
from penstock.queue.broker.jobs import pool_ms
from penstock.queue.job_cost import drain_s
from penstock.queue.record_fields import executed, is_text, unless_wrong_type, whole

MAX_LANES = 1000
"""Tenants' scheduled jobs of one level that are counted."""
MAX_TENANTS = 32
"""Tenants whose jobs that wait for tokens are counted."""
_PAGE = 200
"""Lanes that one command lists."""
_COMMANDS = 64
"""Commands that Redis runs for a read before it serves other clients."""
_LEVELS = range(NUM_LEVELS)
_LEVEL_STEP = 10**13
"""In P:awaiting:<t>, a level's jobs have the scores from its number × this on; rare.lua has the same value."""
_LANE = re.compile(rb"[0-5]:[A-Za-z0-9_-]{1,64}")
_RELEASE_MS = 20
"""A lane with due jobs is looked at again after this time; waiting.lua has the same value."""

Command = tuple[Any, ...]
"""A method of the Redis client, and its arguments."""
Waiting = Mapping[WaitState, WaitingJobs]


class QueueReader:
    """Reads what waits in a pool. Call it within `translated()`."""

    def __init__(self, redis: Redis) -> None:
        self._redis = cast(Any, redis)

    async def read(self, pool: str) -> tuple[Waiting, PerLevel]:
        """Return the waiting jobs, and the predicted KV tokens of those that are queued."""
        time, ahead_ms, costs, tenants, *indexes = await self._run(
            [
                ("time",),
                ("hget", keys.config(pool), "ahead_ms"),
                ("hmget", keys.backlog(pool), [*map(str, _LEVELS)]),
                ("zrange", keys.awaiting_tenants(pool), 0, MAX_TENANTS - 1),
                *(("zcard", keys.waiting(pool, level)) for level in _LEVELS),
                *(_first_of(keys.waiting(pool, level)) for level in _LEVELS),
            ]
        )
        costs, lanes = costs or [None] * NUM_LEVELS, [one.decode() for one in tenants or () if is_text(one)]
        now_ms = pool_ms(time, ahead_ms)
        counts, heads = indexes[:NUM_LEVELS], indexes[NUM_LEVELS:]
        waiting: Waiting = {
            "queued": WaitingJobs(
                tuple(count or 0 for count in counts), tuple(_age_ms(head, now_ms) for head in heads)
            ),
            "scheduled": await self._scheduled(pool, now_ms),
            "awaiting_tokens": await self._awaiting(pool, [one for one in lanes if ":" not in one], now_ms),
            "awaiting_key": await self._awaiting(pool, [one for one in lanes if ":" in one], now_ms),
        }
        return waiting, tuple(map(whole, costs))

    async def _scheduled(self, pool: str, now_ms: int) -> WaitingJobs:
        lanes: list[tuple[bytes, float]] = []
        for at in range(0, MAX_LANES, _PAGE):
            last = min(at + _PAGE, MAX_LANES) - 1
            page = await unless_wrong_type(
                list[tuple[bytes, float]](), self._redis.zrange, keys.delayed_lanes(pool), at, last, withscores=True
            )
            lanes += page
            if len(page) < _PAGE:
                break
        named = [(_level_and_tenant(lane), look_at_ms) for lane, look_at_ms in lanes if _LANE.fullmatch(lane)]
        due = [lane for lane, look_at_ms in named if look_at_ms <= now_ms + _RELEASE_MS]
        found = await self._run(
            [
                *(("zcard", keys.delayed(pool, *lane)) for lane, _ in named),
                *(_first_of(keys.delayed(pool, *lane)) for lane in due),
            ]
        )
        counts, oldest_ms = [0] * NUM_LEVELS, [0] * NUM_LEVELS
        for ((level, _), _), count in zip(named, found, strict=False):
            counts[level] += count or 0
        for (level, _), head in zip(due, found[len(named) :], strict=True):
            oldest_ms[level] = max(oldest_ms[level], _age_ms(head, now_ms))
        return WaitingJobs(tuple(counts), tuple(oldest_ms))

    async def _awaiting(self, pool: str, lanes: Sequence[str], now_ms: int) -> WaitingJobs:
        """Return the jobs that wait in these lanes, each a tenant or one of its keys."""
        sets = [(keys.awaiting(pool, lane), level) for lane in lanes for level in _LEVELS]
        bounds = [(level * _LEVEL_STEP, f"({(level + 1) * _LEVEL_STEP}") for level in _LEVELS]
        found = await self._run(
            [
                *(("zcount", key, *bounds[level]) for key, level in sets),
                *(("zrangebyscore", key, *bounds[level], 0, 1, True) for key, level in sets),
            ]
        )
        counts, oldest_ms = [0] * NUM_LEVELS, [0] * NUM_LEVELS
        for (_, level), count, head in zip(sets, found, found[len(sets) :], strict=False):
            counts[level] += count or 0
            oldest_ms[level] = max(oldest_ms[level], _age_ms(head, now_ms + level * _LEVEL_STEP))
        return WaitingJobs(tuple(counts), tuple(oldest_ms))

    async def _run(self, commands: Sequence[Command]) -> list[Any]:
        """Return the commands' answers, None for a key of another type. They go to Redis a few at a time."""
        answers: list[Any] = []
        for at in range(0, len(commands), _COMMANDS):
            async with self._redis.pipeline(transaction=False) as pipe:
                for name, *arguments in commands[at : at + _COMMANDS]:
                    getattr(pipe, name)(*arguments)
                answers += await executed(pipe)
        return answers


def _first_of(key: str) -> Command:
    return ("zrange", key, 0, 0, False, True)


def queue_state(
    waiting: Waiting,
    cost: PerLevel,
    counts: Mapping[bytes, bytes],
    nodes: Sequence[NodePressure],
    pauses: Sequence[Pause] = (),
) -> QueueState:
    """Return the state of a pool's queue. `counts` is P:counts, `nodes` are the live nodes."""
    engine_ms = tuple(_sums(node.recent_engine_ms for node in nodes))
    whole_ms = sum(engine_ms)
    held_back = {pause.level for pause in pauses}
    to_do = [0 if level in held_back else of_level for level, of_level in enumerate(cost)]
    foreground, background = sum(to_do[:NUM_PRIORITIES]), sum(to_do[NUM_PRIORITIES:])
    is_paused = any(pause.kind == "pool" for pause in pauses)
    return QueueState(
        waiting=waiting,
        running=tuple(int(number) for number in _sums(node.jobs_by_level for node in nodes)),
        cost=cost,
        expired=tuple(whole(counts.get(b"expired_level_%d" % level)) for level in _LEVELS),
        backlog_s=(None, None) if is_paused else (drain_s(nodes, foreground), drain_s(nodes, 0, background)),
        engine_shares=tuple(ms / whole_ms for ms in engine_ms) if whole_ms > 0 else None,
    )


def _sums(rows: Iterable[tuple[float, ...]]) -> list[float]:
    """Return the sum per level. A record may have fewer levels, or none."""
    return [sum(column) for column in zip_longest(NO_JOBS, *rows, fillvalue=0)][:NUM_LEVELS]


def _level_and_tenant(lane: bytes) -> tuple[int, str]:
    level, _, tenant = lane.decode().partition(":")
    return int(level), tenant


def _age_ms(head: Sequence[tuple[bytes, float]] | None, now_ms: int) -> int:
    """Return how long ago the score of a set's first member was; 0 without a member, or if it is still to come.

    Damaged scores may be infinite.
    """
    return now_ms - int(head[0][1]) if head and 0 <= head[0][1] <= now_ms else 0
