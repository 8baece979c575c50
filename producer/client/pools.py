"""What a client knows of pools, keys and usage: cached copies of slowly changing state, and reports."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

from redis.asyncio import Redis

from penstock.contract.errors import PenstockError, UnavailableError
from penstock.contract.pool import PoolActivity, PoolPressure, PoolStats
from penstock.contract.tenant import ApiKey
from penstock.contract.usage import MAX_PAGE_ROWS, UsagePage, UsageQuery
from penstock.producer.client.settings import ADMITTED, decision_of
from penstock.queue import admission
from penstock.queue.broker.connection import Retries, warn_of_eviction
from penstock.queue.broker.key_store import KeyStore
from penstock.queue.broker.pools import ActivityBroker, StatsBroker
from penstock.queue.broker.producer import ProducerBroker, ServedPool
from penstock.queue.broker.usage import UsageBroker
from penstock.runtime.cancellation import cancel_until_done

# Cached copies of slowly changing shared state. One caller at a time fetches a copy, which is valid for a while.

T = TypeVar("T")
PRESSURE_TTL_S = 0.25
POOLS_TTL_S = 1.0
KEYS_TTL_S = 2.0
STALE_S = 2.0
"""How much longer a submission may use an expired copy, while it is fetched anew for later submissions."""
RENEWED_S = 0.1
"""The least time between the starts of fetches for callers that miss something in a valid copy."""


@dataclass(slots=True)
class _Fetch:
    """A running fetch, and the event for which other callers wait."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    error: PenstockError | None = None


@dataclass(frozen=True, slots=True)
class _Fetched(Generic[T]):
    """The result of a fetch, and the loop times at which it began and ended."""

    value: T
    begun_s: float
    ended_s: float


class CachedState(Generic[T]):
    """A value that is fetched at most once per `ttl_s`, by the first caller. Others share the value or the error."""

    def __init__(self, fetch: Callable[[], Awaitable[T]], ttl_s: float, stale_s: float = STALE_S) -> None:
        self._fetch = fetch
        self._ttl_s = ttl_s
        self._stale_s = stale_s
        self._refreshing: asyncio.Task[None] | None = None
        self._running: _Fetch | None = None
        self._held: _Fetched[T] | None = None
        self._last_begun_s = -inf

    async def get(self) -> T:
        """Return the value, at most `ttl_s` old. Raises what the fetch raised."""
        clock = asyncio.get_running_loop().time
        return await self._first(lambda held: clock() < held.ended_s + self._ttl_s)

    async def recent(self) -> T:
        """Return the value, at most `ttl_s + stale_s` old. A call that gets an expired value starts a fetch of it."""
        held = self._held
        late_s = asyncio.get_running_loop().time() - held.ended_s - self._ttl_s if held else inf
        if held is None or late_s >= self._stale_s:
            return await self.get()
        if late_s >= 0 and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.create_task(self._refresh(), name="penstock refresh")
        return held.value

    async def get_or_last(self, patience_s: float) -> T:
        """Return the value as `get` does, or the last one if `get` fails or takes longer than `patience_s`.

        Raises UnavailableError if there is no last value.
        """
        try:
            async with asyncio.timeout(patience_s):
                return await self.get()
        except (TimeoutError, UnavailableError):
            if self._held is None:
                raise UnavailableError("Redis is unreachable", code="redis_away") from None
            return self._held.value

    async def close(self) -> None:
        """Cancel a background fetch."""
        if self._refreshing is not None:
            await cancel_until_done((self._refreshing,))

    async def renewed(self) -> T:
        """Return a value that was fetched after this call, for a caller that missed something in the copy.

        Waits up to RENEWED_S, so that fetches stay that far apart for any number of callers. Raises as `get` does.
        """
        asked_s = asyncio.get_running_loop().time()
        return await self._first(lambda held: held.begun_s >= asked_s, apart_s=RENEWED_S)

    async def _refresh(self) -> None:
        with suppress(PenstockError):  # the next caller that needs the value gets the error
            await self.get()

    async def _first(self, is_good: Callable[[_Fetched[T]], bool], apart_s: float = 0.0) -> T:
        """Return the value once `is_good` accepts it. Fetches for that start at least `apart_s` apart."""
        clock = asyncio.get_running_loop().time
        while (held := self._held) is None or not is_good(held):
            if (fetch := self._running) is not None:
                await fetch.ended.wait()
                # Without error and value, the fetching caller was canceled, and the next caller tries.
                if fetch.error is not None:
                    raise fetch.error
            elif (wait_s := self._last_begun_s + apart_s - clock()) > 0:
                await asyncio.sleep(wait_s)
            else:
                await self._run_fetch()
        return held.value

    async def _run_fetch(self) -> None:
        clock = asyncio.get_running_loop().time
        fetch = self._running = _Fetch()
        begun_s = self._last_begun_s = clock()
        try:
            value = await self._fetch()
            self._held = _Fetched(value, begun_s, clock())
        except PenstockError as error:
            fetch.error = error
            raise
        finally:
            self._running = None
            fetch.ended.set()


class PoolAdmission(CachedState[PoolPressure]):
    """The pressure of one pool. Redis decides about limits; a client only sees to it that there is a node."""

    def __init__(self, fetch: Callable[[], Awaitable[PoolPressure]]) -> None:
        super().__init__(fetch, PRESSURE_TTL_S)

    async def require_node(self) -> None:
        """Return if the pool has a node. Otherwise raise UnavailableError."""
        if not admission.has_node(await self.recent()):
            # The pool's first node may have joined since.
            admission.require_node(await self.renewed())


class Admissions:
    """The admission to each pool, made when it is first needed."""

    def __init__(self, fetch: Callable[[str], Awaitable[PoolPressure]]) -> None:
        """`fetch` returns the pressure of a pool."""
        self._fetch = fetch
        self._of: dict[str, PoolAdmission] = {}

    def of(self, pool: str) -> PoolAdmission:
        """Return the admission to a pool."""
        admission = self._of.get(pool)
        if admission is None:
            admission = self._of[pool] = PoolAdmission(lambda: self._fetch(pool))
        return admission

    @contextmanager
    def counting(self, decisions: Counter[str]) -> Iterator[None]:
        """Count the submission in the block: by the error that refuses it, or else as admitted."""
        try:
            yield
        except PenstockError as error:
            decisions[decision_of(error)] += 1
            raise
        decisions[ADMITTED] += 1

    async def close(self) -> None:
        """Cancel all background fetches."""
        for one in self._of.values():
            await one.close()


# The client's calls for gateways and commands: API keys, usage and the state of pools.


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
