"""Copies of slow-moving shared state, fetched by one caller at a time and good for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from penstock.contract import admission
from penstock.contract.job import Priority
from penstock.contract.keys import NUM_PRIORITIES
from penstock.contract.wire import PoolPressure

T = TypeVar("T")
PRESSURE_TTL_S = 0.25


class Copy(Generic[T]):
    """A value that is fetched at most once per `ttl_s`, by the first who asks while the others wait."""

    def __init__(self, fetch: Callable[[], Awaitable[T]], ttl_s: float) -> None:
        self._fetch = fetch
        self._ttl_s = ttl_s
        self._lock = asyncio.Lock()
        self._held: tuple[T, float] | None = None
        """The value and the loop time until which it is good."""

    async def get(self) -> T:
        """The value, at most `ttl_s` old."""
        clock = asyncio.get_running_loop().time
        async with self._lock:
            if self._held is None or clock() >= self._held[1]:
                self._held = (await self._fetch(), clock() + self._ttl_s)
            return self._held[0]


class Door:
    """Admission to one pool: its pressure as of a moment ago, plus what this process has let in since."""

    def __init__(self, fetch: Callable[[], Awaitable[PoolPressure]]) -> None:
        self._fetch = fetch
        self._pressure = Copy(self._read, PRESSURE_TTL_S)
        self._admitted_cost = [0] * NUM_PRIORITIES

    async def admit(self, cost: int, priority: Priority) -> None:
        """Returns when a job of this cost may be submitted; raises BusyError or UnavailableError when not."""
        pressure = await self._pressure.get()
        admitted_since = sum(self._admitted_cost[: priority + 1])
        admission.decide(pressure, cost=cost, priority=priority, admitted_since=admitted_since)
        self._admitted_cost[priority] += cost

    async def _read(self) -> PoolPressure:
        pressure = await self._fetch()
        self._admitted_cost = [0] * NUM_PRIORITIES
        return pressure
