"""What wakes the inbox: the doorbell channel, a job that left while others wait, the clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

from penstock.queue.broker.retry import pauses
from penstock.queue.broker.shared_connection import SharedConnection

log = logging.getLogger(__name__)

_PING_S = 15.0
"""How often a silent subscription is asked whether it lives."""


class Bell:
    """Rings when there may be something to take. `depth` is how many jobs waited when the queue was last seen."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()
        self.depth = 0
        self.is_heard = True
        """Whether somebody listens at the channel; jobs are found without, but later."""

    def ring(self) -> None:
        """There may be something new."""
        self._rung.set()

    def capacity_freed(self) -> None:
        """A job left; worth a look only if somebody waits."""
        if self.depth:
            self._rung.set()

    async def wait(self, timeout_s: float) -> None:
        """Until it rings, or for this long, since pub/sub may lose a ring."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        self._rung.clear()


async def listen(redis: Redis, channel: str, bell: Bell, on_cancelled: Callable[[str], None]) -> None:
    """Hears the doorbell until cancelled: empty for something new, a job's id for one that was cancelled."""

    def hear(message: bytes) -> None:
        if message:
            on_cancelled(message.decode(errors="replace"))
        else:
            bell.ring()

    patience = pauses()
    while True:
        try:
            line = await SharedConnection.open(redis, hear)
            try:
                await line.call("SUBSCRIBE", channel)
                patience = pauses()
                bell.is_heard = True
                # What was rung before we listened.
                bell.ring()
                while not line.lost.done():
                    await asyncio.wait((line.lost,), timeout=_PING_S)
                    await line.call("PING")
            finally:
                bell.is_heard = False
                line.close()
        except (RedisError, OSError) as error:
            log.warning("doorbell is cut", extra={"reason": str(error)})
        await asyncio.sleep(next(patience))
