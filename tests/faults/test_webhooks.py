"""Gateways are killed while they tell failing receivers of the ends of jobs: each end is told, and nothing inside."""

from __future__ import annotations

from faults.tools.webhook_kills import run_with_kills


async def test_every_end_is_told_although_gateways_are_killed(redis_url: str) -> None:
    report = await run_with_kills(redis_url, num_jobs=60, num_kills=2)
    assert report.violations == []
    assert (report.num_events, report.num_kills) == (60, 2)
    assert report.num_requests >= report.num_events
