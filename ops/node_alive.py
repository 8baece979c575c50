"""Healthcheck of a node's container: exits with 0 when this host's node has given its pool a sign of life lately."""

from __future__ import annotations

import sys

from redis import Redis

from penstock.contract import keys
from penstock.contract.settings import redis_url_of
from penstock.gpu_node.settings import NodeSettings

MAX_SILENCE_MS = 10_000


def main() -> int:
    """Looks through all pools, because the pool's name may be made from the model's."""
    url = redis_url_of(None)
    name = NodeSettings.load(model="any", redis_url=url).name
    with Redis.from_url(url, decode_responses=True, socket_timeout=5) as redis:
        seconds, microseconds = redis.time()
        alive_since = seconds * 1000 + microseconds // 1000 - MAX_SILENCE_MS
        for pool in redis.hkeys(keys.POOLS):
            beats = redis.zrangebyscore(keys.nodes(pool), alive_since, "+inf")
            if any(node_id.rpartition("-")[0] == name for node_id in beats):
                return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
