"""Copies of slow-moving shared state, fetched by one caller at a time and good for a while."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

from penstock.contract.errors import BusyError, PenstockError, UnavailableError
from penstock.contract.job import Priority
from penstock.contract.priority import NUM_PRIORITIES
from penstock.queue import admission
from penstock.queue.wire import PoolPressure
from penstock.runtime.cancellation import cancel_until_done

T = TypeVar("T")
PRESSURE_TTL_S = 0.25
POOLS_TTL_S = 1.0
KEYS_TTL_S = 2.0
STALE_S = 2.0
"""So much longer a submission goes by the copies that it needs, while they are fetched anew for those behind it."""
_JITTER = 0.2
RENEWED_S = 0.1
"""Fetches on behalf of those whom a copy that is still good did not help begin at least this far apart."""


@dataclass(slots=True)
class _Flight:
    """One fetch under way, and who waits for it to land."""

    landed: asyncio.Event = field(default_factory=asyncio.Event)
    error: PenstockError | None = None


@dataclass(frozen=True, slots=True)
class _Fetched(Generic[T]):
    """What a fetch brought, and the loop times at which it began and landed."""

    value: T
    begun_s: float
    landed_s: float


class CachedState(Generic[T]):
    """A value that is fetched at most once per `ttl_s`, by the first who asks; the others share what comes of it."""

    def __init__(self, fetch: Callable[[], Awaitable[T]], ttl_s: float, stale_s: float = STALE_S) -> None:
        self._fetch = fetch
        self._ttl_s = ttl_s
        self._stale_s = stale_s
        self._refreshing: asyncio.Task[None] | None = None
        self._flight: _Flight | None = None
        self._held: _Fetched[T] | None = None
        self._last_begun_s = -inf

    async def get(self) -> T:
        """The value, at most `ttl_s` old; raises what the fetch raised."""
        clock = asyncio.get_running_loop().time
        return await self._first(lambda held: clock() < held.landed_s + self._ttl_s)

    async def recent(self) -> T:
        """The value, at most `stale_s` older than that: who gets such a one lets it be fetched anew for others."""
        held = self._held
        late_s = asyncio.get_running_loop().time() - held.landed_s - self._ttl_s if held else inf
        if held is None or late_s >= self._stale_s:
            return await self.get()
        if late_s >= 0 and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = asyncio.create_task(self._refresh(), name="penstock refresh")
        return held.value

    async def at_hand(self, patience_s: float) -> T:
        """The value as `get` gives it, or the last one where that takes longer or fails; raises UnavailableError where
        there was none.
        """
        try:
            async with asyncio.timeout(patience_s):
                return await self.get()
        except (TimeoutError, UnavailableError):
            if self._held is None:
                raise UnavailableError("Redis is away", code="redis_away") from None
            return self._held.value

    async def close(self) -> None:
        """Ends a fetch that nobody waits for."""
        if self._refreshing is not None:
            await cancel_until_done((self._refreshing,))

    async def renewed(self) -> T:
        """The value as of now or later, for whom the copy did not help; raises as `get` does.

        Waits up to RENEWED_S, so that fetches stay so far apart however many ask.
        """
        asked_s = asyncio.get_running_loop().time()
        return await self._first(lambda held: held.begun_s >= asked_s, apart_s=RENEWED_S)

    async def _refresh(self) -> None:
        with suppress(PenstockError):  # left to whoever needs it, and to the error they get
            await self.get()

    async def _first(self, is_good: Callable[[_Fetched[T]], bool], apart_s: float = 0.0) -> T:
        """The value once it is good; what is fetched for that begins `apart_s` behind the last fetch."""
        clock = asyncio.get_running_loop().time
        while (held := self._held) is None or not is_good(held):
            if (flight := self._flight) is not None:
                await flight.landed.wait()
                # Neither error nor value: whoever fetched was cancelled, and the next one tries.
                if flight.error is not None:
                    raise flight.error
            elif (wait_s := self._last_begun_s + apart_s - clock()) > 0:
                await asyncio.sleep(wait_s)
            else:
                await self._fly()
        return held.value

    async def _fly(self) -> None:
        clock = asyncio.get_running_loop().time
        flight = self._flight = _Flight()
        begun_s = self._last_begun_s = clock()
        try:
            value = await self._fetch()
            self._held = _Fetched(value, begun_s, clock())
        except PenstockError as error:
            flight.error = error
            raise
        finally:
            self._flight = None
            flight.landed.set()


class PoolAdmission:
    """Admission to one pool: its pressure as of a moment ago, plus what this process has let in since."""

    def __init__(self, fetch: Callable[[], Awaitable[PoolPressure]]) -> None:
        self._fetch = fetch
        self._copy = CachedState(self._read, PRESSURE_TTL_S)
        self._admitted_cost = [0] * NUM_PRIORITIES

    async def pressure(self) -> PoolPressure:
        """The pool's nodes and backlog, at most PRESSURE_TTL_S old."""
        return await self._copy.get()

    async def recent(self) -> PoolPressure:
        """The same, up to STALE_S older."""
        return await self._copy.recent()

    async def admit(self, cost: int, priority: Priority) -> None:
        """Returns when a job of this cost may be submitted; raises BusyError or UnavailableError when not."""
        try:
            self._decide(await self.recent(), cost, priority)
        except BusyError:
            # By what may not be so any more.
            self._decide(await self.pressure(), cost, priority)
        except UnavailableError:
            # Its first node may have joined since.
            self._decide(await self._copy.renewed(), cost, priority)
        self._admitted_cost[priority] += cost

    async def close(self) -> None:
        """Ends a fetch that nobody waits for."""
        await self._copy.close()

    def _decide(self, pressure: PoolPressure, cost: int, priority: Priority) -> None:
        admitted_since = sum(self._admitted_cost[: priority + 1])
        try:
            admission.decide(pressure, cost=cost, priority=priority, admitted_since=admitted_since)
        except BusyError as error:
            # Or all who are refused now would come back at once.
            error.retry_after_ms = round(error.retry_after_ms * random.uniform(1 - _JITTER, 1 + _JITTER))
            raise

    async def _read(self) -> PoolPressure:
        pressure = await self._fetch()
        self._admitted_cost = [0] * NUM_PRIORITIES
        return pressure
