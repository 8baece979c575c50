"""Whichever token a node is killed at, its jobs' streams are those of an undisturbed run."""

from __future__ import annotations

from faults.takeover import run_takeovers
from redis.asyncio import Redis

LEASE_MS = 3000


async def test_jobs_of_killed_nodes_go_on_token_exact(redis: Redis, redis_url: str) -> None:
    takeovers = await run_takeovers(redis, redis_url, 5, lanes=3, lease_ms=LEASE_MS, seed=7)
    assert len(takeovers.hits) == 5
