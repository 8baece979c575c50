"""What a client knows of pools and keys: cached copies of slowly changing state, which many callers share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

from penstock.contract.errors import PenstockError, UnavailableError
from penstock.contract.pool import PoolPressure
from penstock.producer.client.settings import ADMITTED, decision_of
from penstock.runtime.event_loop import cancel_until_done

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
        held = self._held
        return held.value if held is not None and self._is_fresh(held) else await self._first(self._is_fresh)

    def _is_fresh(self, held: _Fetched[T]) -> bool:
        return asyncio.get_running_loop().time() < held.ended_s + self._ttl_s

    async def recent(self) -> T:
        """Return the value, at most `ttl_s + stale_s` old. A call that gets an expired value starts a fetch of it."""
        held = self._held
        late_s = asyncio.get_running_loop().time() - held.ended_s - self._ttl_s if held else inf
        if held is None or late_s >= self._stale_s:
            return await self.get()
        if late_s >= 0 and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.create_task(self._refresh(), name="penstock refresh")
        return held.value

    @property
    def last(self) -> T | None:
        """The last value, however old; None before the first one."""
        return None if self._held is None else self._held.value

    async def get_or_last(self, patience_s: float) -> T:
        """Return the value as `get` does, or the last one if `get` fails or takes longer than `patience_s`.

        Raises UnavailableError if there is no last value.
        """
        return await self._or_last(self.get, patience_s, inf)

    async def recent_or_last(self, patience_s: float, max_age_s: float) -> T:
        """Return the value as `recent` does, or the last one if that fails or takes longer than `patience_s`.

        Raises UnavailableError if there is no last value, or if it is older than `max_age_s`.
        """
        return await self._or_last(self.recent, patience_s, max_age_s)

    async def _or_last(self, fetch: Callable[[], Awaitable[T]], patience_s: float, max_age_s: float) -> T:
        try:
            async with asyncio.timeout(patience_s):
                return await fetch()
        except (TimeoutError, UnavailableError):
            held = self._held
            if held is None or asyncio.get_running_loop().time() - held.ended_s > max_age_s:
                raise UnavailableError("Redis is unreachable", code="redis_away") from None
            return held.value

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
    """The pressure of one pool. Redis decides about limits and pauses. A client sees to it that there is a node."""

    def __init__(self, pool: str, fetch: Callable[[], Awaitable[PoolPressure]]) -> None:
        super().__init__(fetch, PRESSURE_TTL_S)
        self._pool = pool

    async def require_node(self) -> None:
        """Return if a node takes jobs of the pool. Otherwise raise UnavailableError.

        A task needs no more than a node: it waits for no capacity.
        """
        # If there was no node, the pool's first one may have joined since.
        if not _has_node(await self.recent()) and not _has_node(await self.renewed()):
            message = "no live node serves this pool; `queue_without_node` of submit and /v1/jobs lets a job wait"
            error = UnavailableError(message, code="no_node")
            error.pool = self._pool
            raise error


def _has_node(pressure: PoolPressure) -> bool:
    return not all(node.draining for node in pressure.nodes)


class Admissions:
    """The admission to each pool, made when it is first needed."""

    def __init__(self, fetch: Callable[[str], Awaitable[PoolPressure]]) -> None:
        """`fetch` returns the pressure of a pool."""
        self._fetch = fetch
        # Keyed by id: pool.
        self._of: dict[str, PoolAdmission] = {}

    def of(self, pool: str) -> PoolAdmission:
        """Return the admission to a pool."""
        admission = self._of.get(pool)
        if admission is None:
            admission = self._of[pool] = PoolAdmission(pool, lambda: self._fetch(pool))
        return admission

    async def close(self) -> None:
        """Cancel all background fetches."""
        for one in self._of.values():
            await one.close()


@contextmanager
def counted(decisions: Counter[str]) -> Iterator[None]:
    """Count the submission in the block: by the error that refuses it, or else as admitted."""
    try:
        yield
    except PenstockError as error:
        decisions[decision_of(error)] += 1
        raise
    decisions[ADMITTED] += 1


@contextmanager
def naming_pool(pool: str) -> Iterator[None]:
    """Name the pool in an error that refuses a submission in the block."""
    try:
        yield
    except PenstockError as error:
        error.pool = pool
        raise
