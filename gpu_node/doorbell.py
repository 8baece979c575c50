"""Wake-ups of the inbox: a message on the doorbell channel, a job that ended while others wait, or a timeout."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

from penstock.queue.broker.connection import pauses
from penstock.queue.broker.shared_connection import SharedConnection

log = logging.getLogger(__name__)

_PING_S = 15.0
"""Interval at which a silent subscription is checked with PING."""


class Bell:
    """An event: there may be jobs to take. `depth`: jobs that waited when the queue was last read."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()
        self.depth = 0
        self.is_heard = True
        """Whether the doorbell channel is subscribed. Otherwise new jobs are found later, by polling."""

    def ring(self) -> None:
        """Wake the inbox: there may be a new job."""
        self._rung.set()

    def capacity_freed(self) -> None:
        """Wake the inbox if jobs wait: a job has freed capacity."""
        if self.depth:
            self._rung.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until it rings, at most `timeout_s` seconds, since pub/sub may lose a message."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        self._rung.clear()


async def listen(redis: Redis, channel: str, bell: Bell, on_message: Callable[[str], None]) -> None:
    """Listen to the doorbell channel until canceled. An empty message means a new job; `on_message` gets all others."""

    def receive(_: bytes, message: bytes) -> None:
        if message:
            on_message(message.decode(errors="replace"))
        else:
            bell.ring()

    patience = pauses()
    while True:
        try:
            line = await SharedConnection.open(redis, receive)
            try:
                await line.call("SUBSCRIBE", channel)
                patience = pauses()
                bell.is_heard = True
                # A message may have been published before the subscription began.
                bell.ring()
                while not line.lost.done():
                    await asyncio.wait((line.lost,), timeout=_PING_S)
                    await line.call("PING")
            finally:
                bell.is_heard = False
                line.close()
        except (RedisError, OSError) as error:
            log.warning("the doorbell is cut off", extra={"reason": str(error)})
        await asyncio.sleep(next(patience))
