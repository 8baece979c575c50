"""Warning for a Redis that may evict keys: an evicted key can be an accepted job."""

from __future__ import annotations

import logging

from redis.asyncio import Redis

from penstock.contract.errors import PenstockError
from penstock.queue.broker.connection import translated

_LOG = logging.getLogger(__name__)

SAFE_POLICY = "noeviction"


async def warn_of_eviction(redis: Redis) -> None:
    """Log a warning unless Redis's `maxmemory-policy` is `noeviction`. Raises nothing."""
    try:
        with translated():
            info = await redis.info("memory")
    except PenstockError as error:
        # The ACL user may not call INFO, or a managed service hides it.
        _LOG.info("redis's memory policy cannot be read", extra={"reason": error.message})
        return
    policy, max_bytes = str(info.get("maxmemory_policy", SAFE_POLICY)), int(info.get("maxmemory", 0))
    if policy != SAFE_POLICY:
        facts = {"policy": policy, "maxmemory": max_bytes, "want": f"maxmemory-policy {SAFE_POLICY}"}
        _LOG.warning("redis may evict keys: an evicted key is a lost job", extra=facts)
