"""The sweep of a pool, which every node, gateway and client runs."""

from __future__ import annotations

import logging

from redis.asyncio import Redis

from penstock.queue.broker import scripts

_LOG = logging.getLogger(__name__)


async def sweep(redis: Redis, pool: str) -> None:
    """Find dead nodes and due jobs, and log the dead nodes. The script limits how often it runs."""
    kind, *found = await scripts.call(redis, "sweep", pool)
    if kind == b"OK":
        lost, num_requeued, num_ended = found
        if lost:
            # Only the process that found them logs them, because Redis keeps no trace of these nodes.
            node_ids = [node_id.decode() for node_id in lost]
            facts = {"pool": pool, "node_ids": node_ids, "num_requeued": num_requeued, "num_ended": num_ended}
            _LOG.warning("nodes are lost", extra=facts)
