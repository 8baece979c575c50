"""The client's calls for gateways and commands: API keys, usage and the state of pools."""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis

from penstock.contract.api_keys import ApiKey
from penstock.contract.usage import MAX_PAGE_ROWS, UsagePage, UsageQuery
from penstock.producer.client.cached_state import KEYS_TTL_S, POOLS_TTL_S, Admissions, CachedState
from penstock.queue.broker.eviction import warn_of_eviction
from penstock.queue.broker.key_store import KeyStore
from penstock.queue.broker.pool_activity import ActivityBroker
from penstock.queue.broker.pool_stats import StatsBroker
from penstock.queue.broker.producer import ProducerBroker, ServedPool
from penstock.queue.broker.retry import Retries
from penstock.queue.broker.usage import UsageBroker
from penstock.queue.pool_activity import PoolActivity
from penstock.queue.pool_stats import PoolStats
from penstock.queue.wire import PoolPressure


class ReportCalls:
    """The calls of `AsyncClient` that read shared state: API keys, usage and the activity of pools."""

    def __init__(self, redis: Redis, retries: Retries) -> None:
        self._redis = redis
        self._retries = retries
        self._broker = ProducerBroker(redis)
        self._pools = CachedState(lambda: retries.call(self._broker.pools), POOLS_TTL_S)
        self._admissions = Admissions(lambda pool: retries.call(lambda: self._broker.pressure(pool)))
        self._stats_broker = StatsBroker(redis)
        self._activity = ActivityBroker(redis)
        self._usage = UsageBroker(redis)
        keys = KeyStore(redis)
        self._keys = CachedState(lambda: retries.call(keys.all), KEYS_TTL_S)

    async def pools(self, *, renewed: bool = False) -> dict[str, ServedPool]:
        """Return every announced model by pool, at most a second old; pools with a live node come first.

        `renewed` fetches them anew, for a caller that misses a model in the copy. It waits up to a tenth of a second.
        """
        return await (self._pools.renewed() if renewed else self._pools.get())

    async def pressure(self, pool: str) -> PoolPressure:
        """Return a pool's live nodes and backlog, at most a quarter of a second old."""
        return await self._admissions.of(pool).get()

    async def api_keys(self, *, patience_s: float | None = None) -> dict[str, ApiKey]:
        """Return every API key by id, at most two seconds old.

        With `patience_s`, return the last known keys if Redis does not answer within that time.
        """
        return await (self._keys.get() if patience_s is None else self._keys.get_or_last(patience_s))

    async def warn_of_eviction(self) -> None:
        """Log a warning if Redis may evict keys."""
        await warn_of_eviction(self._redis)

    async def usage(self, query: UsageQuery, *, after: str | None = None, limit: int = MAX_PAGE_ROWS) -> UsagePage:
        """Return a page of a report of used tokens. `after` is the `next_after` of the page before."""
        return await self._retries.call(lambda: self._usage.page(query, after=after, limit=limit))

    async def pool_stats(self) -> tuple[list[PoolStats], tuple[int, int]]:
        """Return the stats of all pools, and the bytes that Redis uses and may use (0: no limit)."""
        return await self._retries.call(self._stats_broker.all), await self._retries.call(self._stats_broker.memory)

    async def activity(self, pools: Sequence[str]) -> list[PoolActivity]:
        """Return what happens in these pools: their queues, nodes and newest events."""
        return await self._retries.call(lambda: self._activity.of(pools))
