"""Whichever token a node is killed at, streams equal those of a run without faults; `make faults` kills more often."""

from __future__ import annotations

import pytest
from faults.tools.real_takeover import run_real_takeovers
from faults.tools.takeover import run_takeovers
from redis.asyncio import Redis

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("num_kills", [3, pytest.param(24, marks=pytest.mark.slow)])
async def test_jobs_of_killed_nodes_continue_token_exact(redis: Redis, redis_url: str, num_kills: int) -> None:
    takeovers = await run_takeovers(redis, redis_url, num_kills, lanes=3, lease_ms=3000, seed=7)
    assert len(takeovers.hits) + takeovers.num_disturbed >= num_kills


@pytest.mark.slow
@pytest.mark.model
async def test_jobs_of_a_real_model_continue_bit_for_bit(redis: Redis, redis_url: str) -> None:
    takeovers = await run_real_takeovers(redis, redis_url, 4, seed=7)
    assert len(takeovers.hits) >= 4
