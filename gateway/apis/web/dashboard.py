"""The feed of the dashboard: one state per second for all its viewers together, and none without viewers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice

from pydantic_core import to_json

from penstock.contract.errors import BusyError, UnavailableError
from penstock.gateway.apis.web.dashboard_state import MAX_POOLS, gateway_of, pool_of
from penstock.gateway.metrics import GatewayMetrics
from penstock.producer.client import AsyncClient
from penstock.producer.client.pools import CachedState

STATE_INTERVAL_S = 1.0
"""Seconds between two states."""
REDIS_TIMEOUT_S = 2.0
"""Seconds that a state waits for Redis. After that it has no pools."""
MAX_VIEWERS = 100
"""Viewers of one gateway."""
MAX_STREAM_S = 600.0
"""Seconds after which a stream of states ends. The page connects again, which checks its API key again."""


class Dashboard:
    """The states of this gateway's dashboard, shared by its viewers."""

    def __init__(self, client: AsyncClient, metrics: GatewayMetrics, stopping: asyncio.Event) -> None:
        """`stopping` ends all streams of states, because the gateway stops."""
        self._client = client
        self._metrics = metrics
        self._states = CachedState(self._read, STATE_INTERVAL_S)
        self._num_viewers = 0
        self._stopping = stopping

    async def state(self) -> bytes:
        """Return the state as JSON, at most a second old."""
        return await self._states.get()

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """Count a viewer for the duration of the block. Raises BusyError if there are too many."""
        if self._num_viewers >= MAX_VIEWERS:
            message = f"this gateway serves at most {MAX_VIEWERS} viewers of the dashboard"
            raise BusyError(message, retry_after_ms=10_000, code="too_many_viewers")
        self._num_viewers += 1
        try:
            yield
        finally:
            self._num_viewers -= 1

    async def states(self) -> AsyncIterator[bytes]:
        """Yield each new state as JSON, until the gateway stops or the stream is old."""
        ends_s = time.monotonic() + MAX_STREAM_S
        while not self._stopping.is_set() and time.monotonic() < ends_s:
            yield await self.state()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATE_INTERVAL_S):
                    await self._stopping.wait()

    async def _read(self) -> bytes:
        client = self._client
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                records = dict(islice((await client.pools()).items(), MAX_POOLS))
                away = sorted(pool for pool, server in client.servers.named.items() if server.is_away)
                activities = await client.servers.activity([*records])
        except (TimeoutError, UnavailableError):
            return to_json(
                {
                    "at_ms": int(1000 * client.servers.clock.now_s()),
                    "redis_up": False,
                    "gateway": gateway_of(self._metrics),
                    "pools": [],
                }
            )
        folded = [one.pool for one in activities if records[one.pool].is_folded(one.queue.num_waiting)]
        pools = [pool_of(records[one.pool], one) for one in activities if one.pool not in folded]
        state = {
            "at_ms": int(1000 * client.servers.clock.now_s()),
            "redis_up": True,
            "gateway": gateway_of(self._metrics),
            "pools": pools,
        }
        state |= {"folded": folded} if folded else {}
        return to_json(state | {"away": away} if away else state)
