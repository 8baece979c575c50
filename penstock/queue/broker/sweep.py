"""One sweep of a pool, by whoever is alive: nodes, gateways and clients."""

from __future__ import annotations

import logging

from redis.asyncio import Redis

from penstock.queue.broker import scripts

_LOG = logging.getLogger(__name__)


async def sweep(redis: Redis, pool: str) -> None:
    """Finds dead nodes and due jobs, and names the dead ones; the script itself limits how often."""
    kind, *found = await scripts.call(redis, "sweep", pool)
    if kind == b"OK":
        lost, num_requeued, num_ended = found
        if lost:
            # Said by one process only, whichever came first; nothing in Redis tells of those nodes any more.
            node_ids = [node_id.decode() for node_id in lost]
            facts = {"pool": pool, "node_ids": node_ids, "num_requeued": num_requeued, "num_ended": num_ended}
            _LOG.warning("nodes are lost", extra=facts)
