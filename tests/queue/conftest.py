"""Fixtures of the protocol's tests."""

from __future__ import annotations

import pytest
from fakes.queue.harness import Queue
from redis.asyncio import Redis


@pytest.fixture
async def queue(redis: Redis) -> Queue:
    """A pool on an empty Redis; no node has joined it yet."""
    return Queue(redis)
